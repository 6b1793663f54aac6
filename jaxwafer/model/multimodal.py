"""The text model within a multimodal one. Its tensors' names are `checkpoint.hub`'s concern."""

from collections.abc import Callable

from jaxwafer.errors import UserError
from jaxwafer.model.config import Config
from jaxwafer.model.spec import ModelSpec

# What says how images and videos are put in among the tokens.
VISION = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "ignore_index",
    "media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder",
)  # fmt: skip


def text_of(text_spec: Callable[[dict], ModelSpec]) -> Callable[[dict], ModelSpec]:
    """The reader of a config whose `text_config` is for `text_spec`: of `Qwen3_5ForConditionalGeneration`, the text."""

    def spec(fields: dict) -> ModelSpec:
        config = Config(fields)
        config.skip(*VISION)
        text = config.take("text_config", dict)
        tied = config.take("tie_word_embeddings", bool, False)
        if text.setdefault("tie_word_embeddings", tied) != tied:
            raise UserError("config.json: 'tie_word_embeddings' is not the same in 'text_config'")
        config.finish()
        return text_spec(text)

    return spec
