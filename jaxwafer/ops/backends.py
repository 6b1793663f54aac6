"""Which implementation of each operation runs on a platform, and why; for `jaxwafer devices` and every report."""

from collections.abc import Callable

from jaxwafer.ops.append import api as append
from jaxwafer.ops.attention import api as attention
from jaxwafer.ops.expert_matmul import api as expert_matmul
from jaxwafer.ops.head_matmul import api as head_matmul
from jaxwafer.ops.linear_attention import api as linear_attention
from jaxwafer.ops.lookup import api as lookup
from jaxwafer.ops.matmul import api as matmul


def only_reference(platform: str) -> dict[str, str]:
    return {"backend": "reference", "reason": "the only implementation"}


# Operation → what runs on a platform ("cpu", "gpu", "tpu").
OPERATIONS: dict[str, Callable[[str], dict[str, str]]] = {
    "matmul": matmul.implementation,
    "expert_matmul": expert_matmul.implementation,
    "embedding": lookup.implementation,
    "products by head": head_matmul.implementation,
    "KV append": append.implementation,
    "attention": attention.implementation,
    "linear attention": linear_attention.implementation,
    "sampling": only_reference,
}


def implementations(platform: str) -> dict[str, dict[str, str]]:
    """{operation: {"backend", "reason"}} on a platform. Builds the native kernels where they would run."""
    return {operation: implementation(platform) for operation, implementation in OPERATIONS.items()}
