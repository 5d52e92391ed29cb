/* What this library is and what this CPU can run. */
#include "common.h"

/* Digest of the sources this was built from (build.py). */
PDX_API const char *PDX(pdx_digest)(void)
{
    return PDX_DIGEST;
}

/* Largest N for which functions with suffix _vN may be called here. */
PDX_API int PDX(pdx_cpu_level)(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
             __builtin_cpu_supports("bmi2");
    int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512cd");
    return v4 ? 4 : v3 ? 3 : 1;
#else
    return 1;
#endif
}
