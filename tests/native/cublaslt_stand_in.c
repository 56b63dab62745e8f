/* A stand-in for cuBLASLt on the CPU: the same functions by name, computed at once and in column order.
 *
 * Takes operands of 16, 32 and 64 bits and results of the same type or of float32, layouts in either order with a
 * leading dimension and a batch, TRANSA and TRANSB, and every epilog. `workspace` of an algorithm is its second word: a
 * check answers it, and a launch with less is refused. What it was last called with, how many of its objects live, and
 * statuses to fail with are read and set through `stand_in_*`.
 * The fields of a descriptor are plain memory, so that the thread sanitizer sees a launcher that does not lock them.
 */
#define _DEFAULT_SOURCE
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, ALLOC_FAILED = 3, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14 };
enum { RELU = 2, BIAS = 4, DRELU = 8, GELU = 32, DGELU = 64, AUX = 128, BGRAD = 16, BGRADA = 256, BGRADB = 512 };

typedef struct {
  int compute_type, scale_type, transa, transb, bias_type;
  uint32_t epilogue;
  char *bias, *aux;
  int64_t bias_stride, aux_ld, aux_stride;
} Desc;

typedef struct {
  int type, order, batch_count;
  uint64_t rows, cols;
  int64_t ld, stride;
} Layout;

typedef struct {
  uint64_t algo[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} Heuristic;

/* Controls and counters ------------------------------------------------------------------------------------------- */

static atomic_int fail_matmul, fail_check, sleep_us, layouts_until_failure = -1;
static atomic_llong calls, checks, live_descriptors, live_layouts, handles;
static _Atomic(uintptr_t) last_handle, last_stream, last_workspace, last_c, last_d;

void stand_in_fail(int status) { fail_matmul = status; }
void stand_in_fail_check(int status) { fail_check = status; }
void stand_in_fail_layout(int after) { layouts_until_failure = after; } /* -1: never */
void stand_in_sleep(int microseconds) { sleep_us = microseconds; }
long long stand_in_calls(void) { return calls; }
long long stand_in_checks(void) { return checks; }
long long stand_in_live_descriptors(void) { return live_descriptors; }
long long stand_in_live_layouts(void) { return live_layouts; }
long long stand_in_handles(void) { return handles; }
uintptr_t stand_in_last_handle(void) { return last_handle; }
uintptr_t stand_in_last_stream(void) { return last_stream; }
uintptr_t stand_in_last_workspace(void) { return last_workspace; }
uintptr_t stand_in_last_c(void) { return last_c; }
uintptr_t stand_in_last_d(void) { return last_d; }

/* Objects --------------------------------------------------------------------------------------------------------- */

int cublasLtCreate(void **handle) {
  *handle = (void *)(uintptr_t)(0x1000 + atomic_fetch_add(&handles, 1));
  return SUCCESS;
}

int cublasLtMatmulDescCreate(void **made, int compute_type, int scale_type) {
  Desc *desc = calloc(1, sizeof *desc);
  if (!desc) return ALLOC_FAILED;
  desc->compute_type = compute_type;
  desc->bias_type = -1; /* not said, which may be read and not set */
  desc->scale_type = scale_type;
  desc->epilogue = 1;
  live_descriptors++;
  *made = desc;
  return SUCCESS;
}

static int field_of(Desc *desc, int attribute, void **field, size_t *size) {
#define FIELD(number, name) \
  case number: \
    *field = &desc->name; \
    *size = sizeof desc->name; \
    return SUCCESS;
  switch (attribute) {
    FIELD(0, compute_type)
    FIELD(1, scale_type)
    FIELD(3, transa)
    FIELD(4, transb)
    FIELD(7, epilogue)
    FIELD(8, bias)
    FIELD(10, bias_stride)
    FIELD(11, aux)
    FIELD(12, aux_ld)
    FIELD(13, aux_stride)
    FIELD(26, bias_type)
  }
#undef FIELD
  return INVALID_VALUE;
}

int cublasLtMatmulDescSetAttribute(void *desc, int attribute, const void *value, size_t size) {
  void *field;
  size_t wanted;
  if (field_of(desc, attribute, &field, &wanted) || size != wanted) return INVALID_VALUE;
  if (attribute == 26 && *(const int *)value == -1) return INVALID_VALUE;
  memcpy(field, value, size);
  return SUCCESS;
}

int cublasLtMatmulDescGetAttribute(void *desc, int attribute, void *value, size_t size, size_t *written) {
  void *field;
  size_t wanted;
  if (field_of(desc, attribute, &field, &wanted) || size < wanted) return INVALID_VALUE;
  memcpy(value, field, wanted);
  if (written) *written = wanted;
  return SUCCESS;
}

int cublasLtMatmulDescDestroy(void *desc) {
  free(desc);
  live_descriptors--;
  return SUCCESS;
}

int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  if (layouts_until_failure >= 0 && atomic_fetch_sub(&layouts_until_failure, 1) == 0) return ALLOC_FAILED;
  Layout *layout = calloc(1, sizeof *layout);
  if (!layout) return ALLOC_FAILED;
  *layout = (Layout){.type = type, .batch_count = 1, .rows = rows, .cols = cols, .ld = ld};
  live_layouts++;
  *made = layout;
  return SUCCESS;
}

int cublasLtMatrixLayoutSetAttribute(void *target, int attribute, const void *value, size_t size) {
  Layout *layout = target;
  void *field = attribute == 1   ? (void *)&layout->order
                : attribute == 5 ? (void *)&layout->batch_count
                : attribute == 6 ? (void *)&layout->stride
                                 : NULL;
  if (!field || size != (attribute == 6 ? 8 : 4)) return INVALID_VALUE;
  memcpy(field, value, size);
  return SUCCESS;
}

int cublasLtMatrixLayoutDestroy(void *layout) {
  free(layout);
  live_layouts--;
  return SUCCESS;
}

int cublasLtMatmulAlgoCheck(void *handle, void *desc, void *a, void *b, void *c, void *d, const uint64_t *algo,
                            Heuristic *result) {
  (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d;
  checks++;
  if (fail_check) return fail_check;
  memcpy(result->algo, algo, sizeof result->algo);
  result->workspace = algo[1];
  return SUCCESS;
}

/* The product ----------------------------------------------------------------------------------------------------- */

/* A float of 16 bits: how many of them are its significand's, and the exponent of 1. */
typedef struct {
  int digits, one;
} Short;

static const Short half = {10, 15}, bfloat = {7, 127};

static double from_short(uint16_t bits, Short form) {
  int exponent = (bits & 0x7fff) >> form.digits, significand = bits & ((1 << form.digits) - 1);
  double value = exponent == (1 << (15 - form.digits)) - 1 ? (significand ? NAN : INFINITY)
                 : exponent ? ldexp(significand + (1 << form.digits), exponent - form.one - form.digits)
                            : ldexp(significand, 1 - form.one - form.digits);
  return bits & 0x8000 ? -value : value;
}

/* Round to the nearest, to the even one of two; what rounds up into the next binade carries into the exponent. */
static uint16_t to_short(double value, Short form) {
  int exponent, infinite = ((1 << (15 - form.digits)) - 1) << form.digits, sign = signbit(value) ? 0x8000 : 0;
  if (isnan(value)) return (uint16_t)(sign | infinite | 1 << (form.digits - 1));
  if (isinf(value)) return (uint16_t)(sign | infinite);
  frexp(value, &exponent);
  exponent = value == 0 || exponent - 1 < 1 - form.one ? 1 - form.one : exponent - 1;
  if (exponent > form.one) return (uint16_t)(sign | infinite);
  int significand = (int)nearbyint(ldexp(fabs(value), form.digits - exponent));
  int bits = (exponent + form.one - 1) * (1 << form.digits) + significand;
  return (uint16_t)(sign | (bits < infinite ? bits : infinite));
}

static double read_at(const char *at, int type, int64_t i) {
  switch (type) {
    case R_64F: return ((const double *)at)[i];
    case R_32F: return ((const float *)at)[i];
    default: return from_short(((const uint16_t *)at)[i], type == R_16F ? half : bfloat);
  }
}

static void write_at(char *at, int type, int64_t i, double value) {
  switch (type) {
    case R_64F: ((double *)at)[i] = value; break;
    case R_32F: ((float *)at)[i] = (float)value; break;
    default: ((uint16_t *)at)[i] = to_short(value, type == R_16F ? half : bfloat);
  }
}

/* Return whether a product of operands of a type may have a result of another. */
static int pairs(int operands, int result) {
  return operands == result || (result == R_32F && (operands == R_16F || operands == R_16BF));
}

static int64_t place(const Layout *layout, int item, int64_t row, int64_t col) {
  return item * layout->stride + (layout->order ? row * layout->ld + col : row + col * layout->ld);
}

static double element(const char *at, const Layout *layout, int item, int64_t row, int64_t col, int transposed) {
  return read_at(at, layout->type, transposed ? place(layout, item, col, row) : place(layout, item, row, col));
}

static double tanh_part(double z) { return tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)); }

static double gelu_slope(double z) {
  double t = tanh_part(z);
  return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * z * z);
}

/* Apply an epilog to one element; the mask counts its leading dimension and stride in bits. */
static double epilogue(const Desc *desc, int type, int item, int64_t row, int64_t col, double z) {
  uint32_t epilog = desc->epilogue;
  int64_t at = item * desc->aux_stride + row + col * desc->aux_ld;
  if (epilog & BIAS) z += read_at(desc->bias, type, item * desc->bias_stride + row);
  if (epilog & DRELU) return desc->aux[at / 8] >> (at % 8) & 1 ? z : 0;
  if (epilog & DGELU) return z * gelu_slope(read_at(desc->aux, type, at));
  if (epilog & AUX && epilog & RELU) {
    char bit = (char)(1 << (at % 8));
    desc->aux[at / 8] = (char)(z >= 0 ? desc->aux[at / 8] | bit : desc->aux[at / 8] & ~bit);
  }
  if (epilog & AUX && epilog & GELU) write_at(desc->aux, type, at, z);
  if (epilog & RELU) return z < 0 ? 0 : z; /* NaN stays */
  return epilog & GELU ? 0.5 * z * (1 + tanh_part(z)) : z;
}

typedef struct {
  const Desc *desc;
  const char *a, *b, *c;
  const Layout *la, *lb, *lc, *ld;
  char *d;
  double alpha, beta;
  int64_t k;
} Call;

static void compute(const Call *call, int item) {
  const Desc *desc = call->desc;
  int type = call->ld->type;
  int64_t m = (int64_t)call->ld->rows, n = (int64_t)call->ld->cols;
  for (int64_t row = 0; row < m; row++) {
    double sum = 0;
    for (int64_t col = 0; col < n; col++) {
      double z = 0;
      for (int64_t i = 0; i < call->k; i++)
        z += element(call->a, call->la, item, row, i, desc->transa) *
             element(call->b, call->lb, item, i, col, desc->transb);
      z *= call->alpha;
      if (call->beta != 0) z += call->beta * element(call->c, call->lc, item, row, col, 0);
      z = epilogue(desc, type, item, row, col, z);
      sum += z;
      write_at(call->d, type, place(call->ld, item, row, col), z);
    }
    if (desc->epilogue & BGRAD) write_at(desc->bias, type, item * m + row, sum);
  }
  for (int64_t j = 0; desc->epilogue & (BGRADA | BGRADB) && j < (desc->epilogue & BGRADA ? m : n); j++) {
    double sum = 0;
    for (int64_t i = 0; i < call->k; i++)
      sum += desc->epilogue & BGRADA ? element(call->a, call->la, item, j, i, desc->transa)
                                     : element(call->b, call->lb, item, i, j, desc->transb);
    write_at(desc->bias, type, item * (desc->epilogue & BGRADA ? m : n) + j, sum);
  }
}

int cublasLtMatmul(void *handle, void *desc, const void *alpha, const void *a, void *la, const void *b, void *lb,
                   const void *beta, const void *c, void *lc, void *d, void *ld, const uint64_t *algo, void *workspace,
                   size_t workspace_size, void *stream) {
  Call call = {desc, a, b, c, la, lb, lc, ld, d, 0, 0, 0};
  calls++;
  last_handle = (uintptr_t)handle;
  last_stream = (uintptr_t)stream;
  last_workspace = (uintptr_t)workspace;
  last_c = (uintptr_t)c;
  last_d = (uintptr_t)d;
  if (sleep_us) usleep((useconds_t)sleep_us);
  if (fail_matmul) return fail_matmul;
  if (workspace_size < algo[1] || (algo[1] && !workspace)) return INVALID_VALUE;
  if (c == d && lc != ld) return INVALID_VALUE; /* one matrix cannot have two layouts */
  if (!pairs(call.la->type, call.ld->type) || call.la->type != call.lb->type) return NOT_SUPPORTED;
  call.alpha = read_at(alpha, call.desc->scale_type, 0);
  call.beta = read_at(beta, call.desc->scale_type, 0);
  call.k = (int64_t)(call.desc->transa ? call.la->rows : call.la->cols);
  for (int item = 0; item < call.ld->batch_count; item++) compute(&call, item);
  return SUCCESS;
}
