#define WIDTH 16
#define PAIRS 1
#define KERNELS prompt_kernels_bfloat16
#include "prompt_kernels.h"
