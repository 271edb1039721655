"""The types of settings that configuration classes of served families declare.

Written by ``scripts/make_field_types.py``. A line of ROWS has a setting, its types and the
model_types whose class declares it so, or after ``-`` those of SERVED whose class does not.
"""

SERVED = """
afmoe apertus arcee aria_text aya_vision bamba beam biogpt bitnet cohere cohere2 cohere2_moe
cohere2_vision cohere_compass_text cosmos3_omni ctrl cwm dbrx deepseek_vl deepseek_vl_hybrid
dots1 ernie4_5 ernie4_5_moe exaone4 exaone4_5 exaone_moe falcon_h1 falcon_mamba flex_olmo flint
fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified
gemma4_unified_text glm glm4 glm46v glm4_moe glm4v glm4v_text glmga gpt-sw3 gpt2 gpt_bigcode
gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax hyperclovax_vision_v2 idefics2 idefics3
internlm3 internvl iquestcoder jais2 jamba janus jetmoe kolibri1 laguna lfm2 lfm2_moe lfm2_vl
lfm3 lfm3_vl lighton_ocr llama llava llava_next llava_next_video llava_onevision mamba2 mellum
mimo_v2_flash minicpm_ocr minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl_text
ministral ministral3 mistral mistral3 mixtral modernbert-decoder moshi nanochat nemotron
nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt ovis2 persimmon phi phi3 phi4_multimodal
phimoe qianfan_ocr qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3
qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 smolvlm solar_open stablelm starcoder2
vaultgemma video_llama_3 video_llava vipllava
"""
ACTIVATIONS = """
gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh
hardswish laplace leaky_relu linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu
sqrtsoftplus swish tanh xielu
"""
LAYER_TYPES = """
attention chunked_attention compressed_sparse_attention conv deepseek_sparse_attention
full_attention heavily_compressed_attention hybrid hybrid_sliding indexed_attention
linear_attention mamba minimax_m3_sparse moe qwen_sparse_attention reference_sliding_attention
sliding_attention window_attention
"""
MLP_LAYER_TYPES = """
dense sparse
"""
ROWS = """
_remove_final_layer_norm bool: opt
activation_dropout float|int: biogpt
activation_function str: gpt-sw3 gpt2 gpt_bigcode jetmoe opt
activation_sparsity_pattern float|list[float]|null: gemma3n_text
adapter_layer_norm_eps float: aya_vision
add_cross_attention bool: gpt-sw3 gpt2 gpt_bigcode
alignment_intermediate_size int: cohere2_vision
altup_active_idx int: gemma3n_text
altup_coef_clip float: gemma3n_text
altup_correct_scale bool: gemma3n_text
altup_num_inputs int: gemma3n_text
attention_bias bool: afmoe apertus arcee aria_text bamba beam bitnet cohere cohere2 cohere2_moe
  cohere_compass_text dots1 falcon_h1 flex_olmo flint gemma gemma2 gemma3_text gemma3n_text
  gemma4_text gemma4_unified_text glm glm4 glm4_moe gpt_neox gpt_oss granite granite_swa
  granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense
  hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 laguna lfm3 llama mellum
  mimo_v2_flash modernbert-decoder nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid
  olmoe phimoe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text
  qwen3_vl_text seed_oss smollm3 solar_open vaultgemma
attention_dropout float: cohere2_moe hy_v3 lfm3
attention_dropout float|int: apertus arcee beam cohere2 cohere_compass_text cwm exaone4
  exaone_moe flint gemma glm4 glm4_moe glm4v_text gpt_neox gpt_oss granite granite_swa helium
  hunyuan_v1_dense hunyuan_v1_moe hyperclovax internlm3 iquestcoder jamba jetmoe kolibri1 laguna
  mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
  mixtral modernbert-decoder moshi nanochat nemotron nemotron_h olmo olmo2 olmo3 olmoe opt
  persimmon phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text
  qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open stablelm
  starcoder2
attention_dropout float|int|null: afmoe aria_text bamba bitnet cohere dots1 falcon_h1 gemma2
  gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm granitemoe granitemoe_swa
  granitemoehybrid granitemoeshared jais2 llama olmo_hybrid phi qwen2_5_vl_text qwen2_vl_text
  vaultgemma
attention_dropout float|null: flex_olmo
attention_in_multiplier float|null: falcon_h1
attention_k_eq_v bool: gemma4_text gemma4_unified_text
attention_multiplier float|int: granite granite_swa
attention_multiplier float|int|null: granitemoe granitemoe_swa granitemoehybrid granitemoeshared
attention_multiplier float|null: hyperclovax
attention_out_bias bool: seed_oss
attention_out_multiplier float|null: falcon_h1
attention_probs_dropout_prob float|int: biogpt
attention_softmax_in_fp32 bool: gpt_bigcode
attention_value_scale float|null: mimo_v2_flash
attn_config dict|null: dbrx
attn_layer_indices list[int]|null: bamba
attn_layer_offset int: jamba
attn_layer_period int: jamba
attn_logit_softcapping float|null: gemma2 gemma3_text vaultgemma
attn_pdrop float|int: gpt-sw3 gpt2 gpt_bigcode
audio_config dict|null: gemma3n gemma4 gemma4_unified phi4_multimodal
audio_encoder_config dict|null: moshi
audio_soft_tokens_per_image int|null: gemma3n
audio_token_id int|null: gemma3n gemma4 gemma4_unified
audio_vocab_size int|null: moshi
aux_loss_coef float: jetmoe
block_auto_adjust_ff_dim bool: lfm2
block_ffn_dim_multiplier float|int: lfm2
block_multiple_of int: lfm2
block_size int: minimax
boa_token_id int|null: gemma3n gemma4 gemma4_unified
boi_token_id int|null: gemma3n gemma4 gemma4_unified
boi_token_index int|null: gemma3
bos_token_id int: cwm modernbert-decoder
bos_token_id int|null: - aya_vision cohere2_vision cosmos3_omni cwm deepseek_vl
  deepseek_vl_hybrid exaone4_5 fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glm4v_text
  glmga hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llava
  llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3
  modernbert-decoder ovis2 qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl
  qwen3_vl_moe qwen3_vl_text smolvlm video_llama_3 video_llava vipllava
chunk_size int: mamba2 nemotron_h
classifier_activation str: modernbert-decoder
classifier_bias bool: modernbert-decoder
classifier_dropout float|int: gpt_neox modernbert-decoder
clip_qkv float|null: olmo olmoe
cls_token_id int: modernbert-decoder
conv_L_cache int: lfm2 lfm2_moe lfm3
conv_bias bool: lfm2 lfm2_moe lfm3
conv_kernel int: falcon_mamba mamba2 nemotron_h
d_model int|null: dbrx
decoder_bias bool: modernbert-decoder
decoder_sparse_step int: flint qwen2_moe qwen3_moe qwen3_next qwen3_vl_moe_text
dense_intermediate_size int: minimax_m3_vl_text
depth_decoder_config dict|null: moshi
dff int: ctrl
do_layer_norm_before bool: opt
downsample_factor int: aya_vision cohere2_vision lfm2_vl
downsample_mode str: minicpm_ocr minicpmv4_6 minicpmv4_7
downsample_ratio float: internvl qianfan_ocr
drop_vision_last_layer bool: minicpmv4_6
dropout float|int: opt
emb_pdrop float|null: dbrx
embd_pdrop float|int: ctrl gpt-sw3 gpt2 gpt_bigcode phi phi3 phi4_multimodal
embedding_dropout float|int: modernbert-decoder starcoder2
embedding_multiplier float|int: granite granite_swa hyperclovax
embedding_multiplier float|int|null: granitemoe granitemoe_swa granitemoehybrid granitemoeshared
embedding_multiplier float|null: falcon_h1
enable_bias bool: opt
enable_moe_block bool: gemma4_text
enable_moe_fp32_combine bool: hy_v3
eoa_token_id int|null: gemma3n
eoa_token_index int|null: gemma4 gemma4_unified
eod_token_id int|null: hunyuan_v1_dense hunyuan_v1_moe
eoi_token_id int|null: gemma3n gemma4 gemma4_unified
eoi_token_index int|null: gemma3
eos_token_id int|list[int]|null: - aya_vision cohere2_vision cosmos3_omni deepseek_vl
  deepseek_vl_hybrid exaone4_5 fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glm4v_text
  glmga hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llava
  llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 ovis2
  qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe qwen3_vl_text
  smolvlm video_llama_3 video_llava vipllava
expand int: falcon_mamba mamba2 nemotron_h
expert_layer_offset int: jamba
expert_layer_period int: jamba
expert_selection_fn str: cohere2_moe
ffn_config dict|null: dbrx
ffn_dim int: moshi opt
final_logit_softcapping float: gemma3n_text
final_logit_softcapping float|int|null: beam
final_logit_softcapping float|null: gemma2 gemma3_text gemma4_text gemma4_unified_text nanochat
  vaultgemma
first_k_dense_replace int: exaone_moe glm4_moe
first_k_dense_replace int|null: dots1
full_attn_alpha_factor float|int: minimax
full_attn_beta_factor float|int: minimax
full_attn_idxs list[int]|null: lfm2
gating bool|str: laguna
global_attn_every_n_layers int|null: afmoe
head_dim int: beam cohere2_moe cwm flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
  gemma4_unified_text glm4 gpt_oss helium hy_v3 kolibri1 laguna lfm3 mamba2 mellum mimo_v2_flash
  minimax_m2 minimax_m3_vl_text ministral3 nemotron_h qwen3 qwen3_5_moe_text qwen3_5_text
  qwen3_next qwen3_vl_text solar_open vaultgemma
head_dim int|null: afmoe arcee aria_text ernie4_5 glm hunyuan_v1_dense hunyuan_v1_moe
  hyperclovax internlm3 iquestcoder jais2 llama minimax ministral mistral mixtral moshi nemotron
  qwen3_vl_moe_text seed_oss
hidden_act str: - aya_vision cohere2_vision cosmos3_omni ctrl dbrx deepseek_vl
  deepseek_vl_hybrid exaone4_5 fuyu gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4
  gemma4_text gemma4_unified gemma4_unified_text glm46v glm4v glmga gpt-sw3 gpt2 gpt_bigcode
  hyperclovax_vision_v2 idefics2 idefics3 internvl janus jetmoe lfm2 lfm2_moe lfm2_vl lfm3
  lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6
  minicpmv4_7 mistral3 modernbert-decoder nemotron_h opt ovis2 qianfan_ocr qwen2_5_vl qwen2_vl
  qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm vaultgemma video_llama_3 video_llava
  vipllava
hidden_activation str: gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text
  modernbert-decoder vaultgemma
hidden_dropout float|int: gpt_neox nemotron_h persimmon stablelm
hidden_dropout_prob float|int: biogpt
hidden_size int: - aya_vision cohere2_vision cosmos3_omni ctrl dbrx deepseek_vl
  deepseek_vl_hybrid exaone4_5 fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glmga
  gpt-sw3 gpt2 gpt_bigcode hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl
  lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6
  minicpmv4_7 mistral3 qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe
  smolvlm video_llama_3 video_llava vipllava
hidden_size_per_layer_input int: gemma3n_text gemma4_text
high_res_vision_config dict|null: deepseek_vl_hybrid
image_end_id int|null: minicpmv4_7
image_end_token_id int: glm46v glm4v glmga
image_grid_pinpoints list|null: llava_next llava_next_video llava_onevision
image_seq_length int: internvl llava llava_next llava_next_video qianfan_ocr video_llava
  vipllava
image_size int: minicpmv4_6 minicpmv4_7
image_size int|null: fuyu
image_start_id int|null: minicpmv4_7
image_start_token_id int: glm46v glm4v glmga
image_token_id int: cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid exaone4_5 glm46v
  glm4v glmga hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr
  ovis2 qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm
  video_llama_3
image_token_id int|null: fuyu gemma3n gemma4 gemma4_unified minicpm_ocr minicpmv4_6 minicpmv4_7
image_token_index int: aya_vision llava llava_next llava_next_video llava_onevision mistral3
  video_llava vipllava
image_token_index int|null: gemma3
index_block_size int: minimax_m3_vl_text
index_head_dim int: minimax_m3_vl_text
index_local_blocks int: minimax_m3_vl_text
index_n_heads int: minimax_m3_vl_text
index_topk_blocks int: minimax_m3_vl_text
init_std float: opt
initializer_cutoff_factor float: modernbert-decoder
initializer_range float: - aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid
  exaone4_5 gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glmga hyperclovax_vision_v2
  idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video
  llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 opt ovis2 qianfan_ocr qwen2_5_vl
  qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava
initializer_range float|null: gemma3 gemma3n gemma4 gemma4_unified
input_jitter_noise float: phimoe
insert_layer_id int: minicpm_ocr minicpmv4_6 minicpmv4_7
intermediate_size int: - aya_vision cohere2_vision cosmos3_omni ctrl dbrx deepseek_vl
  deepseek_vl_hybrid exaone4_5 falcon_mamba fuyu gemma3 gemma3n gemma3n_text gemma4
  gemma4_unified glm46v glm4v glmga gpt-sw3 gpt2 gpt_bigcode hyperclovax_vision_v2 idefics2
  idefics3 internvl janus kolibri1 lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video
  llava_onevision mamba2 minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 moshi opt ovis2
  qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_vl qwen3_vl_moe
  smolvlm solar_open video_llama_3 video_llava vipllava
intermediate_size int|list[int]: gemma3n_text
is_decoder bool: gpt_neox
key_multiplier float|null: falcon_h1
kv_channels int: jetmoe
laurel_rank int: gemma3n_text
layer_norm_elementwise_affine bool: opt
layer_norm_eps float: biogpt cohere2 cohere2_moe cohere_compass_text gpt_neox jais2 persimmon
  phi stablelm
layer_norm_eps float|null: cohere
layer_norm_epsilon float: ctrl falcon_mamba gpt-sw3 gpt2 gpt_bigcode mamba2 nemotron_h
layer_rope_theta list[float,int]|null: granite_swa granitemoe_swa
layer_types list[str]|null: afmoe beam cohere2 cohere2_moe cohere_compass_text cwm dots1 exaone4
  exaone_moe flint gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text gpt_oss
  granite_swa granitemoe_swa granitemoehybrid kolibri1 laguna lfm2 lfm2_moe lfm3 mellum
  mimo_v2_flash minimax minimax_m3_vl_text ministral modernbert-decoder olmo3 olmo_hybrid qwen2
  qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_next smollm3
  vaultgemma
layerdrop float|int: biogpt opt
layers_block_type list[str]|null: nemotron_h
linear_a_log_max float: olmo_hybrid
linear_a_log_min float: olmo_hybrid
linear_allow_neg_eigval bool: olmo_hybrid
linear_attn_alpha_factor float|int: minimax
linear_attn_beta_factor float|int: minimax
linear_conv_kernel_dim int: olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next
linear_dt_init_floor float: olmo_hybrid
linear_dt_max float: olmo_hybrid
linear_dt_min float: olmo_hybrid
linear_key_head_dim int: qwen3_5_moe_text qwen3_5_text qwen3_next
linear_key_head_dim int|null: olmo_hybrid
linear_num_key_heads int: qwen3_5_moe_text qwen3_5_text qwen3_next
linear_num_key_heads int|null: olmo_hybrid
linear_num_value_heads int: qwen3_5_moe_text qwen3_5_text qwen3_next
linear_num_value_heads int|null: olmo_hybrid
linear_value_head_dim int: qwen3_5_moe_text qwen3_5_text qwen3_next
linear_value_head_dim int|null: olmo_hybrid
lm_head_bias bool: phimoe
lm_head_multiplier float|null: falcon_h1
local_attention int|null: modernbert-decoder
logit_scale float: cohere2 cohere2_moe
logit_scale float|null: cohere cohere_compass_text
logits_scaling float|int: granite granite_swa hyperclovax
logits_scaling float|int|null: granitemoe granitemoe_swa granitemoehybrid granitemoeshared
mamba_chunk_size int|null: bamba falcon_h1 granitemoehybrid
mamba_conv_bias bool: jamba
mamba_conv_bias bool|null: bamba falcon_h1 granitemoehybrid
mamba_d_conv int: jamba
mamba_d_conv int|null: bamba falcon_h1 granitemoehybrid
mamba_d_head int|str|null: bamba falcon_h1 granitemoehybrid
mamba_d_ssm int|null: falcon_h1
mamba_d_state int: jamba
mamba_d_state int|null: bamba falcon_h1 granitemoehybrid
mamba_dt_rank int|str: jamba
mamba_expand int: jamba
mamba_expand int|null: bamba falcon_h1 granitemoehybrid
mamba_head_dim int: nemotron_h
mamba_hidden_act str: nemotron_h
mamba_n_groups int|null: bamba falcon_h1 granitemoehybrid
mamba_n_heads int|null: bamba falcon_h1 granitemoehybrid
mamba_norm_before_gate bool|null: falcon_h1
mamba_num_heads int: nemotron_h
mamba_proj_bias bool: jamba nemotron_h
mamba_proj_bias bool|null: bamba falcon_h1 granitemoehybrid
mamba_rms_norm bool|null: falcon_h1
mamba_ssm_cache_dtype str: nemotron_h
max_position_embeddings int: - aya_vision cohere2_vision cosmos3_omni ctrl dbrx deepseek_vl
  deepseek_vl_hybrid exaone4_5 falcon_mamba fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v
  glm4v glmga gpt-sw3 gpt2 gpt_bigcode hyperclovax_vision_v2 idefics2 idefics3 internvl janus
  lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision mamba2
  minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 ovis2 qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5
  qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava
max_seq_len int|null: dbrx
max_window_layers int: qwen2 qwen2_moe qwen3
max_window_layers int|null: dots1 qwen2_5_vl_text qwen2_vl_text
merge_kernel_size list[int]: minicpm_ocr minicpmv4_6 minicpmv4_7
merger_times int: minicpm_ocr minicpmv4_6 minicpmv4_7
mixer_rms_eps float: falcon_mamba
mlp_alpha_factor float|int: minimax
mlp_beta_factor float|int: minimax
mlp_bias bool: arcee aria_text bamba cwm falcon_h1 granite granite_swa helium hy_v3 hyperclovax
  internlm3 iquestcoder jais2 llama modernbert-decoder nemotron nemotron_h seed_oss smollm3
mlp_dropout float|int: modernbert-decoder
mlp_hidden_act str: nemotron_h
mlp_layer_types list[str]|null: beam exaone_moe hy_v3 laguna mellum mimo_v2_flash
  minimax_m3_vl_text
mlp_layer_types list|null: cohere2_moe
mlp_multipliers list[float]|null: falcon_h1
mlp_only_layers list[int]|null: flint qwen2_moe qwen3_moe qwen3_next qwen3_vl_moe_text
mm_tokens_per_image int|null: gemma3
moe_apply_router_weight_on_input bool: laguna
moe_intermediate_size int: afmoe beam dots1 ernie4_5_moe exaone_moe flint glm4_moe hy_v3
  kolibri1 laguna lfm2_moe mellum mimo_v2_flash nemotron_h qwen2_moe qwen3_5_moe_text qwen3_moe
  qwen3_next qwen3_vl_moe_text solar_open
moe_intermediate_size int|null: gemma4_text
moe_k int|null: ernie4_5_moe
moe_latent_size int|null: nemotron_h
moe_layer_end_index int|null: ernie4_5_moe
moe_layer_interval int|null: ernie4_5_moe
moe_layer_start_index int|null: ernie4_5_moe
moe_norm_min float|null: ernie4_5_moe
moe_num_experts int: aria_text
moe_num_experts int|null: ernie4_5_moe
moe_num_shared_experts int: aria_text
moe_num_shared_experts int|null: ernie4_5_moe
moe_routed_scaling_factor float: laguna
moe_router_logit_softcapping float: laguna
moe_shared_expert_intermediate_size int: nemotron_h
moe_shared_expert_overlap bool: nemotron_h
moe_topk int: aria_text
moe_topk int|list[int]: hunyuan_v1_moe
mtp_layer_types list[str]|null: mellum
mtp_layers_block_type list[str]|null: nemotron_h
mtp_mlp_layer_types list[str]|null: mellum
multi_query bool: gpt_bigcode
multimodal_projector_bias bool: llava llava_next llava_next_video llava_onevision mistral3
  video_llava
mup_enabled bool|null: afmoe
n_embd int: ctrl gpt-sw3 gpt2 gpt_bigcode
n_group int: exaone_moe glm4_moe mimo_v2_flash nemotron_h solar_open
n_group int|null: beam dots1
n_groups int: mamba2 nemotron_h
n_head int: ctrl gpt-sw3 gpt2 gpt_bigcode
n_heads int|null: dbrx
n_inner int|null: gpt-sw3 gpt2 gpt_bigcode
n_layer int: ctrl gpt-sw3 gpt2 gpt_bigcode
n_layers int|null: dbrx
n_positions int: ctrl gpt-sw3 gpt2 gpt_bigcode
n_routed_experts int: glm4_moe mimo_v2_flash nemotron_h solar_open
n_routed_experts int|null: dots1
n_shared_experts int: glm4_moe nemotron_h solar_open
n_shared_experts int|null: dots1
newline_id int|null: minicpmv4_7
no_rope_layer_interval int: smollm3
no_rope_layers list[int]|null: smollm3
norm_bias bool: modernbert-decoder
norm_eps float: lfm2 lfm2_moe lfm3 modernbert-decoder nemotron
norm_epsilon float: starcoder2
norm_topk_prob bool: beam cohere2_moe exaone_moe flex_olmo flint glm4_moe kolibri1 lfm2_moe
  mellum mimo_v2_flash nemotron_h olmoe qwen2_moe qwen3_moe qwen3_next solar_open
norm_topk_prob bool|null: dots1
num_attention_heads int: - aya_vision cohere2_vision cosmos3_omni ctrl dbrx deepseek_vl
  deepseek_vl_hybrid exaone4_5 falcon_mamba fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v
  glm4v glmga gpt-sw3 gpt2 gpt_bigcode hyperclovax_vision_v2 idefics2 idefics3 internvl janus
  jetmoe lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision mamba2
  minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 ovis2 qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5
  qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava
num_attention_heads_per_layer list[int]|null: laguna
num_channels int|null: fuyu
num_codebooks int: moshi
num_dense_layers int: lfm2_moe
num_dense_layers int|null: afmoe
num_experts int: beam cohere2_moe exaone_moe flex_olmo flint hunyuan_v1_moe jamba kolibri1
  laguna lfm2_moe mellum olmoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_vl_moe_text
num_experts int|null: afmoe gemma4_text hy_v3
num_experts_per_tok int: beam cohere2_moe exaone_moe flex_olmo flint glm4_moe gpt_oss jamba
  jetmoe kolibri1 laguna lfm2_moe mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
  mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next
  qwen3_vl_moe_text solar_open
num_experts_per_tok int|null: afmoe dots1 granitemoe granitemoe_swa granitemoehybrid
  granitemoeshared hy_v3
num_heads int: mamba2
num_hidden_layers int: - aya_vision cohere2_vision cosmos3_omni ctrl dbrx deepseek_vl
  deepseek_vl_hybrid exaone4_5 fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glmga
  gpt-sw3 gpt2 gpt_bigcode hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl
  lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6
  minicpmv4_7 mistral3 nemotron_h ovis2 qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe
  qwen3_vl qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava
num_key_value_heads int: beam cwm exaone4 exaone_moe flint gemma gemma2 gemma3_text gemma3n_text
  gemma4_text gemma4_unified_text glm4 glm4_moe gpt_oss helium hy_v3 jamba jetmoe kolibri1
  laguna lfm2 lfm2_moe lfm3 mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral
  ministral3 mistral mixtral nemotron_h phimoe qwen3_5_moe_text qwen3_5_text qwen3_moe
  qwen3_next qwen3_vl_moe_text solar_open stablelm starcoder2 vaultgemma
num_key_value_heads int|null: afmoe apertus arcee aria_text bamba bitnet cohere cohere2
  cohere2_moe cohere_compass_text dots1 ernie4_5 ernie4_5_moe falcon_h1 flex_olmo glm glm4v_text
  granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
  hunyuan_v1_dense hunyuan_v1_moe hyperclovax internlm3 iquestcoder jais2 llama moshi nanochat
  nemotron olmo olmo2 olmo3 olmo_hybrid olmoe phi phi3 phi4_multimodal qwen2 qwen2_5_vl_text
  qwen2_moe qwen2_vl_text qwen3 qwen3_vl_text seed_oss smollm3
num_kv_shared_layers int: gemma3n_text gemma4_text gemma4_unified_text
num_local_experts int: gpt_oss jetmoe minimax minimax_m2 minimax_m3_vl_text mixtral phimoe
num_local_experts int|null: granitemoe granitemoe_swa granitemoehybrid granitemoeshared
num_logits_to_keep int: nemotron_h
num_logits_to_keep int|null: bamba falcon_h1
num_mtp_layers int: glm4_moe
num_mtp_layers int|null: mellum
num_nextn_predict_layers int: nemotron_h
num_shared_experts int: cohere2_moe exaone_moe
num_shared_experts int|null: afmoe hy_v3
original_max_position_embeddings int: phi3
original_max_position_embeddings int|null: phi4_multimodal
output_router_logits bool: afmoe beam cohere2_moe dots1 exaone_moe flex_olmo flint glm4_moe
  gpt_oss hunyuan_v1_moe hy_v3 jamba jetmoe kolibri1 laguna lfm2_moe mellum mimo_v2_flash
  minimax minimax_m2 minimax_m3_vl_text mixtral nemotron_h olmoe phimoe qwen2_moe
  qwen3_5_moe_text qwen3_moe qwen3_next qwen3_vl_moe_text solar_open
output_router_logits bool|null: dbrx ernie4_5_moe granitemoe granitemoe_swa granitemoehybrid
  granitemoeshared
pad_token_id int: modernbert-decoder
pad_token_id int|null: - aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid
  exaone4_5 fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glmga hyperclovax_vision_v2
  idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video
  llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 modernbert-decoder ovis2
  qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm
  video_llama_3 video_llava vipllava
patch_size int|null: fuyu
perceiver_config dict|null: idefics2
pooling str|null: cohere_compass_text
position_embedding_type str|null: granitemoehybrid
prefix_dense_intermediate_size int|null: cohere2_moe
prefix_dense_sliding_window_pattern int: cohere2_moe
pretraining_tp int: cwm hunyuan_v1_dense hunyuan_v1_moe seed_oss
pretraining_tp int|null: aria_text llama
projector_bias bool: lfm2_vl lfm3_vl
projector_hidden_act str: internvl lfm2_vl lfm3_vl llava llava_next llava_next_video
  llava_onevision mistral3 qianfan_ocr video_llava vipllava
projector_hidden_size int: lfm2_vl lfm3_vl
projector_layernorm_eps float: vipllava
projector_use_layernorm bool: lfm2_vl
projectors_bias bool|null: falcon_h1
qk_layernorm bool: persimmon phi stablelm
qkv_bias bool: qwen2_moe
query_pre_attn_scalar int: gemma2 gemma3_text vaultgemma
reorder_and_upcast_attn bool: gpt-sw3 gpt2
rescale_prenorm_residual bool: falcon_mamba mamba2 nemotron_h
resid_pdrop float|int: ctrl gpt-sw3 gpt2 gpt_bigcode phi phi3 phi4_multimodal
resid_pdrop float|null: dbrx
residual_dropout float|int: seed_oss starcoder2
residual_in_fp32 bool: falcon_mamba mamba2 nemotron_h
residual_multiplier float|int: granite granite_swa hyperclovax
residual_multiplier float|int|null: granitemoe granitemoe_swa granitemoehybrid granitemoeshared
rms_norm_eps float: - aya_vision biogpt cohere cohere2 cohere2_moe cohere2_vision
  cohere_compass_text cosmos3_omni ctrl dbrx deepseek_vl deepseek_vl_hybrid exaone4_5
  falcon_mamba fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glmga gpt-sw3 gpt2
  gpt_bigcode gpt_neox hyperclovax_vision_v2 idefics2 idefics3 internvl jais2 janus lfm2
  lfm2_moe lfm2_vl lfm3 lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision
  mamba2 minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 modernbert-decoder nemotron nemotron_h
  olmo opt ovis2 persimmon phi qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl
  qwen3_vl_moe smolvlm stablelm starcoder2 video_llama_3 video_llava vipllava
rms_norm_eps float|null: cohere2_moe
rope_parameters dict|null: - aya_vision biogpt cohere2_moe cohere2_vision cosmos3_omni ctrl
  deepseek_vl deepseek_vl_hybrid exaone4_5 falcon_mamba fuyu gemma3 gemma3n gemma4
  gemma4_unified glm46v glm4v glmga gpt-sw3 gpt2 gpt_bigcode hyperclovax_vision_v2 idefics2
  idefics3 internvl jamba janus lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video
  llava_onevision mamba2 minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 nemotron_h opt ovis2
  qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm
  video_llama_3 video_llava vipllava
rope_scaling dict|null: cohere2_moe
rope_theta float|int: cohere2_moe
rotary_dim int: minimax_m3_vl_text
route_scale float|null: afmoe
routed_scaling_factor float: dots1 exaone_moe glm4_moe lfm2_moe minimax_m3_vl_text solar_open
routed_scaling_factor float|int: beam nemotron_h
routed_scaling_factor float|null: mimo_v2_flash
router_aux_loss_coef float: flex_olmo flint gpt_oss jamba laguna mellum minimax minimax_m2
  minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next
  qwen3_vl_moe_text
router_aux_loss_coef float|null: ernie4_5_moe granitemoe granitemoe_swa granitemoehybrid
  granitemoeshared
router_jitter_noise float: minimax minimax_m2 minimax_m3_vl_text mixtral phimoe
router_scaling_factor float: hy_v3
scale_attention_softmax_in_fp32 bool: gpt_bigcode
scale_attn_by_inverse_layer_idx bool: gpt-sw3 gpt2
scale_attn_weights bool: gpt-sw3 gpt2 gpt_bigcode
scale_embedding bool: biogpt
scale_factor int: idefics3 smolvlm
sep_token_id int: modernbert-decoder
sep_token_id int|null: hunyuan_v1_moe
shared_expert_combination_strategy str: cohere2_moe
shared_expert_intermediate_size int: flint kolibri1 laguna qwen2_moe qwen3_5_moe_text qwen3_next
shared_intermediate_size int: granitemoe_swa granitemoehybrid granitemoeshared
  minimax_m3_vl_text
slice_end_id int|null: minicpmv4_7
slice_start_id int|null: minicpmv4_7
sliding_window int: cwm exaone_moe flint gemma3n_text gemma4_text gemma4_unified_text laguna
  mimo_v2_flash moshi
sliding_window int|null: afmoe beam cohere2 cohere2_moe cohere_compass_text dots1 exaone4 gemma2
  gemma3_text gpt_oss granite_swa granitemoe_swa kolibri1 lfm3 mellum minimax ministral
  ministral3 mistral mixtral nemotron_h olmo3 phi3 phi4_multimodal phimoe qwen2 qwen2_5_vl_text
  qwen2_moe qwen2_vl_text qwen3 qwen3_moe smollm3 starcoder2 vaultgemma
sliding_window_pattern int: cohere2_moe
sliding_window_pattern int|str|null: exaone4 exaone_moe
spatial_merge_size int: lighton_ocr mistral3
spatial_pool_mode str: llava_next_video
spatial_pool_stride int: llava_next_video
ssm_in_multiplier float|null: falcon_h1
ssm_multipliers list[float]|null: falcon_h1
ssm_out_multiplier float|null: falcon_h1
ssm_state_size int: nemotron_h
state_size int: falcon_mamba mamba2
summary_activation str|null: gpt-sw3 gpt2
summary_first_dropout float|int: gpt-sw3 gpt2
summary_proj_to_labels bool: gpt-sw3 gpt2
summary_type str: gpt-sw3 gpt2
summary_use_proj bool: gpt-sw3 gpt2
swiglu_alpha float: gpt_oss minimax_m3_vl_text
swiglu_limit float: gpt_oss minimax_m3_vl_text
text_config dict|null: aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid
  exaone4_5 fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glmga hyperclovax_vision_v2
  idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video
  llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 ovis2 qianfan_ocr qwen2_5_vl
  qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava
tie_word_embeddings bool: - gemma3 gemma3n glm4v_text qwen2_5_vl_text qwen2_vl_text
  qwen3_vl_text
tie_word_embeddings bool|null: gemma3 gemma3n
time_step_floor float: falcon_mamba mamba2 nemotron_h
time_step_init_scheme str: falcon_mamba
time_step_limit list[float]: mamba2 nemotron_h
time_step_limit list[float]|null: bamba falcon_h1 granitemoehybrid
time_step_max float: falcon_mamba mamba2 nemotron_h
time_step_min float: falcon_mamba mamba2 nemotron_h
time_step_rank int|str: falcon_mamba mamba2
time_step_scale float: falcon_mamba
top_k_experts int|null: gemma4_text
topk_group int: exaone_moe glm4_moe mimo_v2_flash nemotron_h solar_open
topk_group int|null: beam dots1
use_associative_scan bool: falcon_mamba jamba
use_attention_gate bool: lfm3
use_bias bool: falcon_mamba mamba2 nemotron_h starcoder2
use_bias bool|null: ernie4_5 ernie4_5_moe
use_bidirectional_attention =all|=vision|null: gemma4_text gemma4_unified_text
use_bidirectional_attention bool|null: gemma gemma2 gemma3_text
use_cache bool: - aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid ernie4_5
  exaone4_5 falcon_h1 fuyu gemma3 gemma4 gemma4_unified glm46v glm4v glmga hyperclovax_vision_v2
  internvl janus lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision
  minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 ovis2 qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5
  qwen3_5_moe qwen3_vl qwen3_vl_moe video_llama_3 video_llava vipllava
use_cache bool|null: ernie4_5 falcon_h1
use_conv_bias bool: falcon_mamba mamba2 nemotron_h
use_double_wide_mlp bool: gemma4_text gemma4_unified_text
use_expert_bias bool: lfm2_moe
use_mamba_kernels bool: jamba nemotron_h
use_mambapy bool: falcon_mamba jamba
use_parallel_residual bool: gpt_neox stablelm
use_post_norm bool: hyperclovax
use_qk_norm bool: glm4_moe
use_qk_norm bool|null: cohere
use_qkv_bias bool: stablelm
use_sandwich_norm bool: lfm3
use_sliding_window bool: qwen2 qwen2_moe qwen3 qwen3_moe smollm3
use_sliding_window bool|null: qwen2_5_vl_text qwen2_vl_text
v_head_dim int: mimo_v2_flash
video_end_token_id int: glm46v glm4v glmga
video_seq_length int: llava_next_video video_llava
video_start_token_id int: glm46v glm4v glmga
video_token_id int: cosmos3_omni exaone4_5 glm46v glm4v glmga hyperclovax_vision_v2 lfm3_vl
  qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe video_llama_3
video_token_id int|null: gemma4 gemma4_unified minicpm_ocr minicpmv4_6 minicpmv4_7
video_token_index int: llava_next_video llava_onevision video_llava
vision_aspect_ratio str: llava_onevision
vision_config dict|null: aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid
  exaone4_5 gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glmga hyperclovax_vision_v2
  idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video
  llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 ovis2 phi4_multimodal qianfan_ocr
  qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm video_llama_3
  video_llava vipllava
vision_end_token_id int: cosmos3_omni lfm3_vl qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl
  qwen3_vl_moe
vision_feature_layer int|list[int]: aya_vision internvl llava llava_next llava_next_video
  llava_onevision mistral3 qianfan_ocr video_llava vipllava
vision_feature_select_strategy =default|=full: llava llava_next llava_next_video llava_onevision
  video_llava
vision_feature_select_strategy str: aya_vision internvl qianfan_ocr
vision_soft_tokens_per_image int|null: gemma3n
vision_start_token_id int: cosmos3_omni lfm3_vl qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl
  qwen3_vl_moe
visual_indicator_token_ids list[int]: ovis2
vocab_size int: - aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid
  exaone4_5 fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glmga hyperclovax_vision_v2
  idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video
  llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 qianfan_ocr qwen2_5_vl qwen2_vl
  qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava
vocab_size_per_layer_input int: gemma3n_text gemma4_text
vq_config dict|null: janus
word_embed_proj_dim int|null: opt
z_loss_coefficient float|null: bamba
"""
