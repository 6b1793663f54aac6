"""Number formats: QuantizedArray, packing, per-tensor policy, and what each occupies."""
