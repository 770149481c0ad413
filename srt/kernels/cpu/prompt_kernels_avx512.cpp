#define WIDTH 16
#define PAIRS 0
#define KERNELS prompt_kernels_avx512
#include "prompt_kernels.h"
