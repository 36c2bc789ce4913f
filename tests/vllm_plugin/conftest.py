"""Settings of vLLM, which reads them when it is first imported. Its tests have their own environment."""

import os

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other programs have the cores too
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine in this process starts in seconds, and its errors arrive here
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
