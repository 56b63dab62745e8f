/* Plays XLA to the handler: eight threads instantiate, execute and free calls on several devices.
 *
 * Built with the thread sanitizer, which reports every access that no lock orders. Each thread checks its results, and
 * the refusals that XLA on a CPU never brings about are checked before.
 */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher.h"
#include "xla/ffi/api/c_api.h"

enum { THREADS = 8, ROUNDS = 100, DEVICES = 3, M = 3, N = 4, K = 5 };
enum { A, B, BIAS, OUT = 5 };

typedef struct State State;
typedef int (*Provider)(const char *, int64_t, void **, char *, int64_t);
Library *library_new(void *, void *, void *, void *, void *, void *, void *);
Descriptor *descriptor_new(const Library *, void *);
void descriptor_release(Descriptor *);
Program *program_new(const Library *, void *, Descriptor *, const int64_t[4][7], const uint64_t[8], size_t, size_t, int,
                     int, int *);
State *state_new(Program *, double, double, int, const char *, int, int, const int[], const int64_t[]);
void state_retain(State *), state_release(State *);
XLA_FFI_Error *cuda_instantiate(XLA_FFI_CallFrame *), *cuda_execute(XLA_FFI_CallFrame *);
void handler_serve(int, Provider, int (*)(void **));
long handler_in_flight(void), handler_instantiations(void), handler_executions(void), handler_live_states(void);
long handler_holders(void);

int cublasLtCreate(void **), cublasLtMatmul(void), cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t);
int cublasLtMatmulDescCreate(void **, int, int), cublasLtMatmulDescDestroy(void *), cublasLtMatrixLayoutCreate(void);
int cublasLtMatrixLayoutSetAttribute(void), cublasLtMatrixLayoutDestroy(void), cublasLtMatmulAlgoCheck(void);
long long stand_in_calls(void), stand_in_handles(void), stand_in_live_descriptors(void), stand_in_live_layouts(void);
uintptr_t stand_in_last_stream(void);

/* XLA ------------------------------------------------------------------------------------------------------------- */

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  char message[1024];
};

struct XLA_FFI_ExecutionContext {
  void *state;
  int ordinal;
};

static void (*deleter)(void *);
static atomic_int types;

/* Which function of XLA's fails, if any. */
enum { NONE, TYPE_REGISTER, STATE_SET, STREAM_GET, ORDINAL_GET };
static atomic_int refused;

static XLA_FFI_Error *error_create(XLA_FFI_Error_Create_Args *args) {
  XLA_FFI_Error *error = calloc(1, sizeof *error);
  error->code = args->errc;
  snprintf(error->message, sizeof error->message, "%s", args->message);
  return error;
}

static XLA_FFI_Error *refusal(XLA_FFI_Error_Code code, const char *message) {
  XLA_FFI_Error_Create_Args args = {0, NULL, message, code};
  return error_create(&args);
}

static XLA_FFI_Error *type_register(XLA_FFI_Type_Register_Args *args) {
  if (refused == TYPE_REGISTER) return refusal(XLA_FFI_Error_Code_ALREADY_EXISTS, "type is refused");
  deleter = args->type_info->deleter;
  args->type_id->type_id = 7 + atomic_fetch_add(&types, 1);
  return NULL;
}

static XLA_FFI_Error *state_set(XLA_FFI_State_Set_Args *args) {
  if (refused == STATE_SET || args->type_id->type_id != 7)
    return refusal(XLA_FFI_Error_Code_INTERNAL, "state is refused");
  args->ctx->state = args->state;
  return NULL;
}

static XLA_FFI_Error *state_get(XLA_FFI_State_Get_Args *args) {
  if (!args->ctx->state || args->type_id->type_id != 7)
    return refusal(XLA_FFI_Error_Code_NOT_FOUND, "state is not set");
  args->state = args->ctx->state;
  return NULL;
}

static XLA_FFI_Error *stream_get(XLA_FFI_Stream_Get_Args *args) {
  if (refused == STREAM_GET) return refusal(XLA_FFI_Error_Code_UNAVAILABLE, "stream is refused");
  args->stream = (void *)(uintptr_t)(0xcafe0 + args->ctx->ordinal);
  return NULL;
}

static XLA_FFI_Error *ordinal_get(XLA_FFI_DeviceOrdinal_Get_Args *args) {
  if (refused == ORDINAL_GET) return refusal(XLA_FFI_Error_Code_UNAVAILABLE, "ordinal is refused");
  args->device_ordinal = args->ctx->ordinal;
  return NULL;
}

static XLA_FFI_Api api = {
    .struct_size = sizeof(XLA_FFI_Api),
    .XLA_FFI_Error_Create = error_create,
    .XLA_FFI_Type_Register = type_register,
    .XLA_FFI_State_Set = state_set,
    .XLA_FFI_State_Get = state_get,
    .XLA_FFI_Stream_Get = stream_get,
    .XLA_FFI_DeviceOrdinal_Get = ordinal_get,
};

static XLA_FFI_Error *ask_metadata(XLA_FFI_Handler *handler, XLA_FFI_Metadata *metadata) {
  XLA_FFI_Metadata_Extension extension = {{sizeof extension, XLA_FFI_Extension_Metadata, NULL}, metadata};
  XLA_FFI_CallFrame frame = {.extension_start = &extension.extension_base, .api = &api};
  return handler(&frame);
}

static XLA_FFI_Error *instantiate_by(XLA_FFI_ExecutionContext *context, char *attribute, XLA_FFI_AttrType kind,
                                     char *text) {
  XLA_FFI_ByteSpan name = {attribute, strlen(attribute)}, value = {text, strlen(text)}, *names[] = {&name};
  XLA_FFI_AttrType kinds[] = {kind};
  void *values[] = {&value};
  XLA_FFI_CallFrame frame = {.api = &api, .ctx = context};
  frame.attrs = (XLA_FFI_Attrs){XLA_FFI_Attrs_STRUCT_SIZE, NULL, 1, kinds, names, values};
  return cuda_instantiate(&frame);
}

static XLA_FFI_Error *instantiate(XLA_FFI_ExecutionContext *context, char *text) {
  return instantiate_by(context, "problem", XLA_FFI_AttrType_STRING, text);
}

typedef struct {
  _Alignas(16) float a[M * K], b[K * N], bias[N], out[M * N], odd[M * K + 1];
} Memory;

static XLA_FFI_Buffer buffer(float *data, int64_t *dims) {
  return (XLA_FFI_Buffer){XLA_FFI_Buffer_STRUCT_SIZE, NULL, XLA_FFI_DataType_F32, data, 1, dims};
}

/* Which array starts where none may. */
typedef enum { ALL_EVEN, ODD_A, ODD_OUT } Odd;

static XLA_FFI_Error *execute(XLA_FFI_ExecutionContext *context, Memory *memory, Odd odd) {
  int64_t dims[] = {M * K, K * N, N, M * N};
  float *a = odd == ODD_A ? &memory->odd[1] : memory->a, *out = odd == ODD_OUT ? &memory->odd[1] : memory->out;
  XLA_FFI_Buffer buffers[] = {buffer(a, &dims[0]), buffer(memory->b, &dims[1]), buffer(memory->bias, &dims[2]),
                              buffer(out, &dims[3])};
  void *operands[] = {&buffers[0], &buffers[1], &buffers[2]}, *results[] = {&buffers[3]};
  XLA_FFI_CallFrame frame = {.api = &api, .ctx = context};
  frame.args = (XLA_FFI_Args){XLA_FFI_Args_STRUCT_SIZE, NULL, 3, NULL, operands};
  frame.rets = (XLA_FFI_Rets){XLA_FFI_Rets_STRUCT_SIZE, NULL, 1, NULL, results};
  return cuda_execute(&frame);
}

static int wrong;

static void expect(int holds, const char *what) {
  if (holds) return;
  printf("wrong: %s\n", what);
  wrong++;
}

/* The planner ----------------------------------------------------------------------------------------------------- */

static State *kept;

static State *planned(Library *library) {
  /* A is b, N x K in column order; B is a, K x M; D is out, N x M. */
  static const int64_t layouts[4][7] = {
      {0, N, K, N, 0, 1, 0}, {0, K, M, K, 0, 1, 0}, {0, N, M, N, 0, 1, 0}, {0, N, M, N, 0, 1, 0}};
  static const uint64_t algorithm[8] = {66};
  static const int slots[9] = {A, B, BIAS, OUT};
  static const int64_t bytes[9] = {4 * M * K, 4 * K * N, 4 * N, 4 * M * N};
  const uint32_t bias_epilogue = 4;
  void *pointer;
  int status;
  cublasLtMatmulDescCreate(&pointer, 0, 0);
  cublasLtMatmulDescSetAttribute(pointer, 7, &bias_epilogue, sizeof bias_epilogue);
  Descriptor *descriptor = descriptor_new(library, pointer);
  Program *program = program_new(library, (void *)0x1, descriptor, layouts, algorithm, 0, 0, 0, 1, &status);
  descriptor_release(descriptor);
  expect(!state_new(program, 1, 0, 0, "the text", 9, 0, slots, bytes), "no place for so many operands");
  expect(!state_new(program, 1, 0, 0, "the text", 0, 9, slots, bytes), "no place for so many results");
  State *state = state_new(program, 1, 0, 0, "the text", 3, 1, slots, bytes);
  program_release(program);
  return state;
}

static int provide(const char *text, int64_t length, void **state, char *message, int64_t capacity) {
  char asked = length == 1 ? *text : '?';
  if (asked == 'n') return 0; /* nothing: what ctypes makes of an interrupt */
  if (asked == '1' || asked == 'b') {
    state_retain(kept);
    *state = kept;
  }
  if (asked == '1') return 0;
  snprintf(message, (size_t)capacity, asked == 'u' ? "a code without a name" : "no product");
  return asked == 'u' ? 99 : XLA_FFI_Error_Code_INVALID_ARGUMENT;
}

static atomic_int create_status;

/* Slow enough for threads to meet in it, which must not. */
static int create(void **handle) {
  if (create_status) return create_status;
  usleep(20000);
  return cublasLtCreate(handle);
}

/* Checks ---------------------------------------------------------------------------------------------------------- */

static void expect_error(XLA_FFI_Error *error, XLA_FFI_Error_Code code, const char *part) {
  expect(error && error->code == code && strstr(error->message, part), error ? error->message : part);
  free(error);
}

static pthread_barrier_t together;

static void *work(void *argument) {
  intptr_t me = (intptr_t)argument, faults = 0;
  Memory memory = {0};
  for (int i = 0; i < M * K; i++) memory.a[i] = 1;
  for (int i = 0; i < K * N; i++) memory.b[i] = 1;
  for (int i = 0; i < N; i++) memory.bias[i] = (float)(100 * me + i);
  pthread_barrier_wait(&together);
  for (int round = 0; round < ROUNDS; round++) {
    XLA_FFI_ExecutionContext context = {NULL, (int)(me + round) % DEVICES};
    XLA_FFI_Metadata metadata;
    faults += ask_metadata(cuda_instantiate, &metadata) || instantiate(&context, "1") ||
              execute(&context, &memory, ALL_EVEN);
    for (int i = 0; i < M * N; i++) faults += memory.out[i] != (float)(K + 100 * me + i % N);
    deleter(context.state);
  }
  return (void *)faults;
}

/* An instantiation fails with its message, and what is executed all the same is an error too. */
static void expect_no_state(char *text, XLA_FFI_Error_Code code, const char *part) {
  Memory memory = {0};
  XLA_FFI_ExecutionContext nowhere = {NULL, 0};
  expect_error(instantiate(&nowhere, text), code, part);
  expect_error(execute(&nowhere, &memory, ALL_EVEN), XLA_FFI_Error_Code_NOT_FOUND, "state is not set");
}

/* What goes wrong before cuBLASLt is called is an error, and it is not called. */
static void expect_no_launch(XLA_FFI_ExecutionContext *context) {
  Memory memory = {0};
  long long before = stand_in_calls();
  expect_error(execute(context, &memory, ODD_A), XLA_FFI_Error_Code_INVALID_ARGUMENT, "operand 0 (a) is at 0x");
  expect_error(execute(context, &memory, ODD_OUT), XLA_FFI_Error_Code_INVALID_ARGUMENT, "result 0 (out) is at 0x");
  refused = STREAM_GET;
  expect_error(execute(context, &memory, ALL_EVEN), XLA_FFI_Error_Code_UNAVAILABLE, "stream is refused");
  refused = ORDINAL_GET;
  expect_error(execute(context, &memory, ALL_EVEN), XLA_FFI_Error_Code_UNAVAILABLE, "ordinal is refused");
  refused = NONE;
  for (int i = 0; i < 2; i++) {
    context->ordinal = i ? 1000 : -1;
    expect_error(execute(context, &memory, ALL_EVEN), XLA_FFI_Error_Code_INTERNAL, "CUBLAS_STATUS_INVALID_VALUE");
  }
  context->ordinal = 1;
  create_status = 3;
  expect_error(execute(context, &memory, ALL_EVEN), XLA_FFI_Error_Code_INTERNAL, "CUBLAS_STATUS_ALLOC_FAILED");
  create_status = 0;
  expect(stand_in_calls() == before, "no launch");
}

static void check_refusals(void) {
  Memory memory = {0};
  XLA_FFI_ExecutionContext context = {NULL, 0};
  expect_no_state("1", XLA_FFI_Error_Code_FAILED_PRECONDITION, "fusedops.xla.ensure_registered()");
  handler_serve(1, provide, create);
  expect_no_state("2", XLA_FFI_Error_Code_INVALID_ARGUMENT, "fusedops: no product");
  expect_no_state("b", XLA_FFI_Error_Code_INVALID_ARGUMENT, "fusedops: no product"); /* an error, and a state too */
  expect_no_state("u", XLA_FFI_Error_Code_INTERNAL, "fusedops: a code without a name");
  expect_no_state("n", XLA_FFI_Error_Code_INTERNAL, "neither a product nor an error");
  expect_error(instantiate_by(&context, "prob", XLA_FFI_AttrType_STRING, "1"), XLA_FFI_Error_Code_INVALID_ARGUMENT,
               "no string attribute \"problem\"");
  expect_error(instantiate_by(&context, "problem", XLA_FFI_AttrType_SCALAR, "1"), XLA_FFI_Error_Code_INVALID_ARGUMENT,
               "no string attribute \"problem\"");
  refused = STATE_SET;
  expect_no_state("1", XLA_FFI_Error_Code_INTERNAL, "state is refused");
  refused = NONE;
  expect(!instantiate(&context, "1"), "an instantiation");
  expect_no_launch(&context);
  context.ordinal = 2;
  expect(!execute(&context, &memory, ALL_EVEN) && stand_in_last_stream() == 0xcafe2, "the stream of the call");
  api.struct_size = offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get); /* an XLA that does not know it yet */
  expect(!execute(&context, &memory, ALL_EVEN), "a call without an ordinal");
  api.struct_size = sizeof api;
  deleter(context.state);
}

int main(void) {
  pthread_t threads[THREADS];
  XLA_FFI_Metadata metadata;
  refused = TYPE_REGISTER;
  expect_error(ask_metadata(cuda_instantiate, &metadata), XLA_FFI_Error_Code_ALREADY_EXISTS, "type is refused");
  refused = NONE;
  expect(!ask_metadata(cuda_execute, &metadata) && !metadata.state_type_id.type_id, "no state type of execute");
  expect(!ask_metadata(cuda_instantiate, &metadata) && metadata.state_type_id.type_id == 7, "the state's type");
  expect(metadata.traits == XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE, "the traits");
  kept = planned(library_new(cublasLtMatmul, cublasLtMatmulDescSetAttribute, cublasLtMatmulDescDestroy,
                             cublasLtMatrixLayoutCreate, cublasLtMatrixLayoutSetAttribute, cublasLtMatrixLayoutDestroy,
                             cublasLtMatmulAlgoCheck));
  check_refusals();
  pthread_barrier_init(&together, NULL, THREADS);
  for (intptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)i);
  for (int i = 0; i < THREADS; i++) {
    void *faults;
    pthread_join(threads[i], &faults);
    expect(!faults, "the results of a thread");
  }
  expect(handler_executions() == THREADS * ROUNDS + 15, "executions");
  expect(handler_instantiations() == THREADS * ROUNDS + 9, "instantiations");
  expect(handler_live_states() == 1 && !handler_holders() && !handler_in_flight() && types == 1, "the counts");
  expect(stand_in_handles() == DEVICES - 1, "a handle for each other device");
  state_retain(kept);
  state_release(kept);
  state_release(kept);
  expect(!handler_live_states() && !stand_in_live_descriptors() && !stand_in_live_layouts(), "all is freed");
  puts(wrong ? "failed" : "all is right");
  return wrong != 0;
}
