"""Every metric name that the runtime exposes, for its exporter and for the operator's autoscaler.

Owns names and buckets only. Imports nothing. Counters are named without ``_total``, which the
exposition adds: ``exposed`` gives the name in a scrape.

The ``vllm:`` names have vLLM's meaning, so that gateways, dashboards and autoscalers made for it
work unchanged; ``kv_cache_usage_perc`` is a share from 0 to 1 despite its name.
"""

# Labels of every series.
MODEL = "model_name"
ENGINE = "engine"
PHASE = "phase"  # of STARTUP: startup_parts.PARTS; of RUNNING_BY_PHASE: prefilling, decoding

# -- gauges
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"  # capacity, deferred
SLEEP_STATE = "vllm:engine_sleep_state"  # by sleep_state
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"

# -- counters
PROMPT_TOKENS = "vllm:prompt_tokens"
PROMPT_TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source"
GENERATION_TOKENS = "vllm:generation_tokens"
PREFIX_CACHE_QUERIES = "vllm:prefix_cache_queries"  # tokens
PREFIX_CACHE_HITS = "vllm:prefix_cache_hits"  # tokens
PREEMPTIONS = "vllm:num_preemptions"
REQUEST_SUCCESS = "vllm:request_success"  # by finished_reason
ADMISSION_REJECTIONS = "vllm:admission_rejections"  # by reason

# -- histograms
TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"
E2E_LATENCY = "vllm:e2e_request_latency_seconds"
QUEUE_TIME = "vllm:request_queue_time_seconds"
PREFILL_TIME = "vllm:request_prefill_time_seconds"
DECODE_TIME = "vllm:request_decode_time_seconds"
INFERENCE_TIME = "vllm:request_inference_time_seconds"
REQUEST_PROMPT_TOKENS = "vllm:request_prompt_tokens"
REQUEST_GENERATION_TOKENS = "vllm:request_generation_tokens"
REQUEST_N = "vllm:request_params_n"
REQUEST_MAX_TOKENS = "vllm:request_params_max_tokens"
REQUEST_PREEMPTIONS = "vllm:request_num_preemptions"
REQUEST_COMPUTED_TOKENS = "vllm:request_prefill_kv_computed_tokens"
ITERATION_TOKENS = "vllm:iteration_tokens_total"  # a histogram despite its name

# -- ours
ARRIVALS = "fairlead_arrivals"
ABORTED = "fairlead_aborted"
FAILED = "fairlead_failed"
RUNNING_BY_PHASE = "fairlead_requests_running_by_phase"
STEPS = "fairlead_steps"
STEPS_LAUNCHED = "fairlead_steps_launched"
STEP_SECONDS = "fairlead_step_seconds"  # a counter: time spent in steps
STEP_FAILURES = "fairlead_step_failures"
ENGINE_FAULTS = "fairlead_engine_faults"
QUEUE_TIMEOUTS = "fairlead_queue_timeouts"
SLOW_READERS = "fairlead_slow_readers"
GRAMMAR_COMPILATIONS = "fairlead_grammar_compilations"
GRAMMAR_SECONDS = "fairlead_grammar_compile_seconds"  # a counter: time spent in compilations
GRAMMAR_REFUSALS = "fairlead_grammar_refusals"
GRAMMAR_CACHE_HITS = "fairlead_grammar_cache_hits"
GRAMMAR_BUSY = "fairlead_grammar_busy"
GRAMMARS_PENDING = "fairlead_grammars_pending"
INVARIANT_VIOLATIONS = "fairlead_invariant_violations"
CONTAINED_ERRORS = "fairlead_contained_errors"  # in metrics and views; no request ends
OFFLOADED = "fairlead_offloaded_requests"
OFFLOADS = "fairlead_offloads"
OLDEST_WAIT = "fairlead_oldest_wait_seconds"
BLOCKS = "fairlead_blocks"
FREE_BLOCKS = "fairlead_free_blocks"
CACHED_BLOCKS = "fairlead_cached_blocks"
INFLIGHT = "fairlead_inflight"
DRAIN_INFLIGHT = "fairlead_drain_inflight"
STARTUP = "fairlead_startup_seconds"  # by phase
API_KEYS = "fairlead_api_keys"
API_KEY_FILE_BROKEN = "fairlead_api_key_file_broken"
CERTIFICATE_BROKEN = "fairlead_certificate_broken"
UNAUTHORIZED = "fairlead_unauthorized"
KEY_LIMITED = "fairlead_key_limited"
TENANT_WAITING = "fairlead_tenant_waiting"  # by tenant, as is the next
TENANT_RUNNING = "fairlead_tenant_running"
HTTP_CONNECTIONS = "fairlead_http_connections"  # by port
HTTP_BODY_BYTES = "fairlead_http_body_bytes"
HTTP_LOGPROB_BYTES = "fairlead_http_logprob_bytes"
HTTP_RESIDENT_BYTES = "fairlead_http_resident_bytes"
HTTP_LOOP_LAG = "fairlead_http_loop_lag_seconds"  # a histogram

COUNTERS = frozenset(
    {
        PROMPT_TOKENS,
        PROMPT_TOKENS_BY_SOURCE,
        GENERATION_TOKENS,
        PREFIX_CACHE_QUERIES,
        PREFIX_CACHE_HITS,
        PREEMPTIONS,
        OFFLOADS,
        REQUEST_SUCCESS,
        ADMISSION_REJECTIONS,
        ARRIVALS,
        ABORTED,
        FAILED,
        STEPS,
        STEP_SECONDS,
        STEPS_LAUNCHED,
        STEP_FAILURES,
        ENGINE_FAULTS,
        QUEUE_TIMEOUTS,
        SLOW_READERS,
        GRAMMAR_COMPILATIONS,
        GRAMMAR_SECONDS,
        GRAMMAR_REFUSALS,
        GRAMMAR_CACHE_HITS,
        GRAMMAR_BUSY,
        INVARIANT_VIOLATIONS,
        CONTAINED_ERRORS,
        UNAUTHORIZED,
        KEY_LIMITED,
    }
)

# Upper bounds in seconds, as in vLLM.
_LONG = (10.0, 20.0, 40.0, 80.0)
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *_LONG,
    *(160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *_LONG,
)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTION_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# Ours: a token every 10 ms is a fast stream, and a lag of a second is felt by every client.
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
# Tokens of one step: powers of two, up to the largest token budget in use.
ITERATION_BUCKETS = (
    1.0,
    8.0,
    16.0,
    32.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
)
# Tokens of one request. Equal for all models, so that models can be compared.
LENGTH_BUCKETS = (*(float(step * 10**scale) for scale in range(6) for step in (1, 2, 5)), 1e6)


def exposed(name: str) -> str:
    """The series name in a scrape; counters end in ``_total``."""
    return f"{name}_total" if name in COUNTERS else name
