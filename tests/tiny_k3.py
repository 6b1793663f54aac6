"""A tiny Kimi K3: every part of it, in awkward sizes."""

import numpy as np
from support import MemoryCheckpoint, random_checkpoint

# Three heads of either kind and seven experts over two cores; a latent of one slice and a bit; four blocks, none of
# which ends where a wafer of two or three does; numbers of the maths that are not K3's, so that they must be read.
TEXT = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "float32", "vocab_size": 97,
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 10, "num_attention_heads": 3,
    "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "hidden_act": "situ", "activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.5, "attn_res_block_size": 3,
    "q_lora_rank": 14, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "mla_use_nope": True, "mla_use_output_gate": True,
    "num_experts": 7, "num_experts_per_token": 3, "num_shared_experts": 2, "moe_intermediate_size": 20,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "routed_expert_hidden_size": 36, "latent_moe_use_norm": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 10], "kda_layers": [1, 2, 3, 5, 6, 7, 9], "head_dim": 12, "num_heads": 3,
        "short_conv_kernel_size": 4, "gate_lower_bound": -2.0, "use_full_rank_gate": True,
    },
}  # fmt: skip
CONFIG = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "float32",
    "text_config": TEXT, "vision_config": {"patch_size": 14}, "tie_word_embeddings": False, "ignore_index": -100,
}  # fmt: skip


def tiny_k3() -> MemoryCheckpoint:
    """Random weights in memory, in the hub's layout: `A_log` is flat and as long as a head, with zeros at its end."""
    source, linear = random_checkpoint(CONFIG), TEXT["linear_attn_config"]
    for name, tensor in source.tensors.items():
        if name.endswith("A_log"):
            source.tensors[name] = np.pad(tensor.reshape(-1), (0, linear["head_dim"] - linear["num_heads"]))
    return source
