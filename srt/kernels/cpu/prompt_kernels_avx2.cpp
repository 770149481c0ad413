#define WIDTH 8
#define PAIRS 0
#define KERNELS prompt_kernels_avx2
#include "prompt_kernels.h"
