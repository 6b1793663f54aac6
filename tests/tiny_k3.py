"""A tiny Kimi K3: every part of it, in awkward sizes."""

import numpy as np
from support import MemoryCheckpoint, random_checkpoint

# Three heads of either kind and seven experts over two cores; a latent of one slice and a bit; blocks that end within a
# wafer and where it ends; numbers of the maths that are not K3's, so that they must be read.
TEXT = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "float32", "vocab_size": 97,
    "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3,
    "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "hidden_act": "situ", "activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.5, "attn_res_block_size": 2,
    "q_lora_rank": 14, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "mla_use_nope": True, "mla_use_output_gate": True,
    "num_experts": 7, "num_experts_per_token": 3, "num_shared_experts": 2, "moe_intermediate_size": 20,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "routed_expert_hidden_size": 36, "latent_moe_use_norm": True,
}  # fmt: skip
LINEAR = {"head_dim": 12, "num_heads": 3, "short_conv_kernel_size": 4, "gate_lower_bound": -2.0,
          "use_full_rank_gate": True}  # fmt: skip
# What writes to the residual stream. As in trained models it adds less than is there; otherwise norms of what is almost
# nothing make differences of rounding large.
WRITING = ("o_proj.weight", "mlp.down_proj.weight", "routed_expert_up_proj.weight", "shared_experts.down_proj.weight")


def config(layers: int) -> dict:
    """As K3's: full attention in every fourth layer and in the last."""
    numbers = range(1, layers + 1)
    full = [n for n in numbers if n % 4 == 0 or n == layers]
    lists = {"full_attn_layers": full, "kda_layers": [n for n in numbers if n not in full]}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "float32",
        "text_config": TEXT | {"num_hidden_layers": layers, "linear_attn_config": LINEAR | lists},
        "vision_config": {"patch_size": 14}, "tie_word_embeddings": False, "ignore_index": -100,
    }  # fmt: skip


def tiny_k3(layers: int = 7) -> MemoryCheckpoint:
    """Random weights in memory, in the hub's layout: `A_log` is flat and as long as a head, with zeros at its end."""
    source = random_checkpoint(config(layers))
    for name, tensor in source.tensors.items():
        if name.endswith("A_log"):
            source.tensors[name] = np.pad(tensor.reshape(-1), (0, LINEAR["head_dim"] - LINEAR["num_heads"]))
        elif name.endswith(WRITING):
            source.tensors[name] = 0.25 * tensor
        elif name.endswith("embed_tokens.weight"):
            source.tensors[name] = TEXT["hidden_size"] ** 0.5 * tensor
    return source
