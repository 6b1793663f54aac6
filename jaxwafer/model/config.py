"""Reading a Hugging Face `config.json`: fields are taken one by one, and what is left must be known not to matter."""

from typing import Any

from jaxwafer.errors import UserError

# Fields that say nothing about the maths of decoding: provenance, training, generation defaults.
IGNORED = frozenset(
    """
    _name_or_path architectures model_type torch_dtype dtype transformers_version use_cache initializer_range
    attention_dropout pad_token_id bos_token_id eos_token_id unk_token_id pretraining_tp is_llama_config
    rope_interleaved max_window_layers _attn_implementation_autoset chunk_size_feed_forward output_hidden_states
    output_attentions return_dict id2label label2id problem_type is_encoder_decoder transformers.js_config auto_map
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores prefix remove_invalid_values repetition_penalty return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torchscript
    typical_p use_bfloat16
    """.split()
)

# More than any model has of anything: what is larger is damage, and would take all memory to plan.
MAX_SIZE = 1 << 24


class Config:
    """A config whose fields must all be understood. `take` a field, `require` a value; `finish` rejects leftovers."""

    def __init__(self, fields: dict[str, Any]):
        self.fields = fields
        self._left = {k for k, v in fields.items() if k not in IGNORED and v is not None}

    def take(self, name: str, kind: type, default: Any = ...) -> Any:
        """The field as `kind` (int, float, bool, str, list); without a default a missing or null field is an error."""
        self._left.discard(name)
        value = self.fields.get(name)
        if value is None:
            if default is ...:
                raise UserError(f"config.json lacks {name!r}")
            return default
        numeric = kind is float and type(value) is int and abs(value) < 2**53
        if not numeric and type(value) is not kind:
            raise UserError(f"config.json: {name!r} should be {kind.__name__}, not {value!r:.60}")
        return kind(value)

    def positive(self, name: str, default: Any = ..., *, kind: type = int, most: float = MAX_SIZE) -> Any:
        value = self.take(name, kind, default)
        if value is None:
            return None
        if not value > 0:
            raise UserError(f"config.json: {name!r} must be positive, not {value}")
        if value > most:
            raise UserError(f"config.json: {name!r} = {value} is more than any model has (at most {most})")
        return value

    def heads(self) -> tuple[int, int]:
        """Attention heads, and key/value heads, which divide them (and are as many where the field is missing)."""
        heads = self.positive("num_attention_heads")
        kv_heads = self.positive("num_key_value_heads", heads)
        if heads % kv_heads:
            raise UserError(f"config.json: {heads} attention heads do not divide into {kv_heads} key/value heads")
        return heads, kv_heads

    def chosen(self, name: str) -> tuple[int, int]:
        """Experts, the field of this name, and how many of them a token goes through."""
        experts, chosen = self.positive(name), self.positive("num_experts_per_tok")
        if chosen > experts:
            raise UserError(f"config.json: a token cannot go through {chosen} of {experts} experts")
        return experts, chosen

    def require(self, name: str, *allowed: Any) -> None:
        """The field, where it is present, must be one of `allowed`: other values change the maths in ways not built."""
        self._left.discard(name)
        value = self.fields.get(name)
        if value is not None and value not in allowed:
            raise UserError(f"config.json: {name!r} = {value!r} is not supported (supported: {list(allowed)})")

    def skip(self, *names: str) -> None:
        """Fields that another reader has understood."""
        self._left.difference_update(names)

    def native_format(self) -> str:
        """The format that an unquantised checkpoint of this config holds its matrices in."""
        name = self.take("torch_dtype", str, None) or self.take("dtype", str, "bfloat16")
        formats = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
        if name not in formats:
            raise UserError(f"config.json: dtype {name!r} is not supported (supported: {', '.join(formats)})")
        return formats[name]

    def finish(self) -> None:
        if self._left:
            raise UserError(
                f"config.json: {sorted(self._left)[0]!r} is not understood and may change the maths; refusing"
            )
