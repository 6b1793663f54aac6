"""Pictures of plans: PNG sheets and self-contained HTML pages. Everything here reads `partition`."""
