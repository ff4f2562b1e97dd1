"""Expositions of SGLang and TensorRT-LLM, with the metric names of their documentation."""

SGLANG = """\
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="llama"} 8.128902e+06
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="llama"} 7.557572e+06
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="llama"} 2.0e+06
sglang:cached_tokens_total{cache_source="host",model_name="llama"} 300000.0
sglang:cached_tokens_total{cache_source="storage_mooncake",model_name="llama"} 40000.0
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{model_name="llama"} 11228.0
sglang:num_retracted_requests_total{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 3.0
sglang:num_retracted_requests_total{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="1"} 3.0
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="llama",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.28
sglang:cache_hit_rate{engine_type="unified",model_name="llama",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.0075
sglang:num_running_reqs{engine_type="unified",model_name="llama",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 162.0
sglang:num_queue_reqs{engine_type="unified",model_name="llama",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2826.0
sglang:cache_config_info{engine_type="unified",model_name="llama",num_pages="4096",page_size="64"} 1.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{is_streaming="true",le="0.04",model_name="llama"} 1.0
sglang:time_to_first_token_seconds_bucket{is_streaming="true",le="0.1",model_name="llama"} 6.0
sglang:time_to_first_token_seconds_bucket{is_streaming="true",le="+Inf",model_name="llama"} 11.0
sglang:time_to_first_token_seconds_bucket{is_streaming="false",le="0.04",model_name="llama"} 1.0
sglang:time_to_first_token_seconds_bucket{is_streaming="false",le="0.1",model_name="llama"} 1.0
sglang:time_to_first_token_seconds_bucket{is_streaming="false",le="+Inf",model_name="llama"} 2.0
sglang:time_to_first_token_seconds_sum{is_streaming="true",model_name="llama"} 2.0
sglang:time_to_first_token_seconds_sum{is_streaming="false",model_name="llama"} 0.5
"""


TENSORRT_LLM = """\
# TYPE trtllm_request_success_total counter
trtllm_request_success_total{engine_type="trtllm",finished_reason="stop",model_name="qwen"} 40.0
trtllm_request_success_total{engine_type="trtllm",finished_reason="length",model_name="qwen"} 2.0
# TYPE trtllm_prompt_tokens_total counter
trtllm_prompt_tokens_total{engine_type="trtllm",model_name="qwen"} 9000.0
# TYPE trtllm_generation_tokens_total counter
trtllm_generation_tokens_total{engine_type="trtllm",model_name="qwen"} 1200.0
# TYPE trtllm_prompt_cached_tokens_total counter
trtllm_prompt_cached_tokens_total{engine_type="trtllm",model_name="qwen"} 4096.0
trtllm_num_requests_running{engine_type="trtllm",model_name="qwen"} 4.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="qwen"} 1.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="qwen"} 0.4
trtllm_kv_cache_hit_rate{engine_type="trtllm",model_name="qwen"} 0.6
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="qwen"} 1000.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="qwen"} 32.0
trtllm_time_to_first_token_seconds_bucket{engine_type="trtllm",le="0.1",model_name="qwen"} 30.0
trtllm_time_to_first_token_seconds_bucket{engine_type="trtllm",le="+Inf",model_name="qwen"} 42.0
trtllm_time_per_output_token_seconds_bucket{engine_type="trtllm",le="0.1",model_name="qwen"} 30.0
trtllm_time_per_output_token_seconds_bucket{engine_type="trtllm",le="+Inf",model_name="qwen"} 42.0
"""
