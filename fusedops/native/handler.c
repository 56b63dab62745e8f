/* The XLA FFI handler: the custom call by which a compiled JAX program launches a planned product.
 *
 * An executable asks a provider, which is Python, for the state of each call when it is instantiated; what runs later
 * is C alone: no interpreter, no allocation, no wait. The stages prepare and initialize run on every execution, so they
 * are left out. What instantiate finds is shared by all devices and threads of an executable and is never written.
 *
 * The cuBLASLt handle of a device other than the one that the program was planned on is made at the first execution
 * there, on the assumption that XLA has the device current on the thread that it calls from, and lives as long as the
 * process: a captured graph may refer to it.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launcher.h"
#include "xla/ffi/api/c_api.h"

#define ATTRIBUTE "problem"
#define DEVICES 256
#define MAX_BUFFERS 8
#define ALIGNMENT 16 /* of every address, which the programs were planned with */
#define MESSAGE_BYTES 4096

/* What a buffer is for. */
enum { A, B, BIAS, C, AUX, OUT, WORKSPACE, SLOTS };
static const char *const SLOT_NAMES[SLOTS] = {"a", "b", "bias", "c", "aux", "out", "workspace"};

typedef struct {
  int slot;
  int64_t bytes;
} Expected;

/* What an instantiated call keeps: immutable but for the count of its users. */
typedef struct {
  Program *program;
  double alpha, beta;
  int ordinal; /* the device that the program was planned on */
  int operand_count, result_count;
  Expected operands[MAX_BUFFERS], results[MAX_BUFFERS];
  atomic_long users;
  char text[]; /* the problem's, for messages */
} State;

/* Return 0 and a state with a reference for the caller; or a code of XLA_FFI_Error_Code and a message. */
typedef int (*Provider)(const char *text, int64_t length, void **state, char *message, int64_t capacity);

/* Each platform has a registry of types, a provider and a cuBLASLt of its own. */
typedef struct {
  XLA_FFI_TypeId type;
  _Atomic(Provider) provider;
  int (*_Atomic create)(void **handle); /* cublasLtCreate */
  _Atomic(void *) handles[DEVICES];
} Platform;

static Platform cuda, host;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of types and of making handles */
static atomic_long in_flight, instantiations, executions, live_states, holders;

/* States ---------------------------------------------------------------------------------------------------------- */

void state_retain(State *state) { atomic_fetch_add(&state->users, 1); }

void state_release(State *state) {
  if (atomic_fetch_sub(&state->users, 1) != 1) return;
  program_release(state->program);
  free(state);
  atomic_fetch_sub(&live_states, 1);
}

/* Return a state with one reference, or NULL where memory is short or the program needs more workspace than it gets.
 *
 * `slots` and `bytes` are those of the operands and then those of the results. The program is retained. */
State *state_new(Program *program, double alpha, double beta, int ordinal, const char *text, int operand_count,
                 int result_count, const int slots[], const int64_t bytes[]) {
  int64_t workspace = 0;
  if (operand_count > MAX_BUFFERS || result_count > MAX_BUFFERS) return NULL;
  size_t text_bytes = strlen(text) + 1;
  State *state = calloc(1, sizeof *state + text_bytes);
  if (!state) return NULL;
  for (int i = 0; i < operand_count + result_count; i++) {
    Expected *expected = i < operand_count ? &state->operands[i] : &state->results[i - operand_count];
    *expected = (Expected){slots[i], bytes[i]};
    if (slots[i] == WORKSPACE) workspace = bytes[i];
  }
  if ((int64_t)program_workspace(program) > workspace) {
    free(state);
    return NULL;
  }
  program_retain(program);
  state->program = program;
  state->alpha = alpha;
  state->beta = beta;
  state->ordinal = ordinal;
  state->operand_count = operand_count;
  state->result_count = result_count;
  memcpy(state->text, text, text_bytes);
  atomic_init(&state->users, 1);
  atomic_fetch_add(&live_states, 1);
  return state;
}

/* XLA frees an executable on any thread, after the interpreter's end too. */
static void release_holder(void *state) {
  atomic_fetch_sub(&holders, 1);
  state_release(state);
}

/* Errors ---------------------------------------------------------------------------------------------------------- */

static XLA_FFI_Error *failed(const XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, code};
  return frame->api->XLA_FFI_Error_Create(&args);
}

#define FAILED(frame, code, ...)                        \
  do {                                                  \
    char message[MESSAGE_BYTES];                        \
    snprintf(message, sizeof message, __VA_ARGS__);     \
    return failed(frame, XLA_FFI_Error_Code_##code, message); \
  } while (0)

static const char *status_name(int status) {
  switch (status) {
    case 1: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case 3: return "CUBLAS_STATUS_ALLOC_FAILED";
    case 7: return "CUBLAS_STATUS_INVALID_VALUE";
    case 8: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case 11: return "CUBLAS_STATUS_MAPPING_ERROR";
    case 13: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case 14: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case 15: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case 16: return "CUBLAS_STATUS_LICENSE_ERROR";
    default: return "a status without a name";
  }
}

/* Metadata -------------------------------------------------------------------------------------------------------- */

static int asks_for_metadata(const XLA_FFI_CallFrame *frame) {
  return frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata;
}

static void describe(const XLA_FFI_CallFrame *frame, XLA_FFI_TypeId type) {
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
  metadata->api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  metadata->api_version.extension_start = NULL;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
  metadata->state_type_id = type;
}

/* Describe the handler, and register the type of its state the first time: registered from Python instead, before
 * there is a backend, it would come after the handler and break all handlers of the platform. */
static XLA_FFI_Error *describe_with_type(const XLA_FFI_CallFrame *frame, Platform *platform) {
  static const char name[] = "fusedops_state";
  static const XLA_FFI_TypeInfo info = {XLA_FFI_TypeInfo_STRUCT_SIZE, NULL, release_holder};
  XLA_FFI_Error *error = NULL;
  pthread_mutex_lock(&lock);
  if (!platform->type.type_id) {
    XLA_FFI_ByteSpan span = {name, sizeof name - 1};
    XLA_FFI_Type_Register_Args args = {XLA_FFI_Type_Register_Args_STRUCT_SIZE, NULL, span, &platform->type, &info};
    error = frame->api->XLA_FFI_Type_Register(&args);
  }
  if (!error) describe(frame, platform->type);
  pthread_mutex_unlock(&lock);
  return error;
}

/* Instantiate ----------------------------------------------------------------------------------------------------- */

static const XLA_FFI_ByteSpan *problem_text(const XLA_FFI_Attrs *attributes) {
  for (int64_t i = 0; i < attributes->size; i++) {
    const XLA_FFI_ByteSpan *name = attributes->names[i];
    if (attributes->types[i] == XLA_FFI_AttrType_STRING && name->len == sizeof ATTRIBUTE - 1 &&
        !memcmp(name->ptr, ATTRIBUTE, name->len))
      return attributes->attrs[i];
  }
  return NULL;
}

static XLA_FFI_Error *instantiate(XLA_FFI_CallFrame *frame, Platform *platform) {
  if (asks_for_metadata(frame)) return describe_with_type(frame, platform);
  atomic_fetch_add(&instantiations, 1);
  const XLA_FFI_ByteSpan *text = problem_text(&frame->attrs);
  if (!text) FAILED(frame, INVALID_ARGUMENT, "fusedops: the call has no string attribute \"" ATTRIBUTE "\"");
  char message[MESSAGE_BYTES] = "fusedops: ";
  size_t used = strlen(message);
  void *state = NULL;
  int code = 0;
  atomic_fetch_add(&in_flight, 1); /* before the provider is read: see `platform_serve` */
  Provider provide = atomic_load(&platform->provider);
  if (provide)
    code = provide(text->ptr, (int64_t)text->len, &state, message + used, (int64_t)(sizeof message - used));
  atomic_fetch_sub(&in_flight, 1);
  if (!provide)
    FAILED(frame, FAILED_PRECONDITION,
           "fusedops: nobody plans products in this process: call fusedops.xla.ensure_registered() before a program is "
           "loaded, and load none while the process ends");
  if (!code && !state) /* what is raised where the callback is entered, ctypes prints and takes for 0 */
    FAILED(frame, INTERNAL,
           "fusedops: the planner gave neither a product nor an error; see what was written to stderr");
  if (code) {
    if (state) state_release(state);
    int known = XLA_FFI_Error_Code_CANCELLED <= code && code <= XLA_FFI_Error_Code_UNAUTHENTICATED;
    return failed(frame, known ? (XLA_FFI_Error_Code)code : XLA_FFI_Error_Code_INTERNAL, message);
  }
  XLA_FFI_State_Set_Args args = {XLA_FFI_State_Set_Args_STRUCT_SIZE, NULL,           frame->ctx,
                                 XLA_FFI_ExecutionStage_INSTANTIATE, &platform->type, state};
  XLA_FFI_Error *error = frame->api->XLA_FFI_State_Set(&args);
  if (error)
    state_release(state);
  else
    atomic_fetch_add(&holders, 1);
  return error;
}

/* Execute --------------------------------------------------------------------------------------------------------- */

static int64_t bytes_of(const XLA_FFI_Buffer *buffer) {
  int64_t bytes;
  switch (buffer->dtype) {
    case XLA_FFI_DataType_U8: bytes = 1; break;
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16: bytes = 2; break;
    case XLA_FFI_DataType_F32: bytes = 4; break;
    case XLA_FFI_DataType_F64: bytes = 8; break;
    default: return -1;
  }
  for (int64_t i = 0; i < buffer->rank; i++) bytes *= buffer->dims[i];
  return bytes;
}

/* Put the addresses of operands or results in their slots. */
static XLA_FFI_Error *place(const XLA_FFI_CallFrame *frame, const State *state, const char *kind, int64_t given,
                            void *const *buffers, int count, const Expected *expected, void *slots[SLOTS]) {
  if (given != count)
    FAILED(frame, INVALID_ARGUMENT, "fusedops: the call has %lld %ss, expected %d by %s", (long long)given, kind, count,
           state->text);
  for (int i = 0; i < count; i++) {
    const XLA_FFI_Buffer *buffer = buffers[i];
    const char *name = SLOT_NAMES[expected[i].slot];
    int64_t bytes = bytes_of(buffer);
    if (bytes != expected[i].bytes)
      FAILED(frame, INVALID_ARGUMENT,
             "fusedops: %s %d (%s) has %lld bytes, expected %lld: the call was made for other shapes or dtypes than "
             "those of %s",
             kind, i, name, (long long)bytes, (long long)expected[i].bytes, state->text);
    if ((uintptr_t)buffer->data % ALIGNMENT)
      FAILED(frame, INVALID_ARGUMENT,
             "fusedops: %s %d (%s) is at %p, expected a multiple of %d: pass an array of its own, not memory imported "
             "at an odd address, to %s",
             kind, i, name, buffer->data, ALIGNMENT, state->text);
    slots[expected[i].slot] = buffer->data;
  }
  return NULL;
}

/* Give the ordinal of the call's device; that of the program where this XLA does not tell. */
static XLA_FFI_Error *ordinal_of(const XLA_FFI_CallFrame *frame, int *ordinal) {
  const size_t needed = offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get) + sizeof(void *);
  if (frame->api->struct_size < needed) return NULL;
  XLA_FFI_DeviceOrdinal_Get_Args args = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL, frame->ctx, 0};
  XLA_FFI_Error *error = frame->api->XLA_FFI_DeviceOrdinal_Get(&args);
  if (!error) *ordinal = args.device_ordinal;
  return error;
}

/* Give the handle of a device that the program was not planned on, made where it is the first; or return a status. */
static int other_handle(Platform *platform, int ordinal, void **handle) {
  const int invalid_value = 7;
  int status = 0;
  if (ordinal < 0 || ordinal >= DEVICES) return invalid_value;
  *handle = atomic_load(&platform->handles[ordinal]);
  if (*handle) return 0;
  pthread_mutex_lock(&lock);
  *handle = atomic_load(&platform->handles[ordinal]);
  if (!*handle) {
    status = atomic_load(&platform->create)(handle);
    if (!status) atomic_store(&platform->handles[ordinal], *handle);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

static XLA_FFI_Error *execute(XLA_FFI_CallFrame *frame, Platform *platform) {
  if (asks_for_metadata(frame)) {
    describe(frame, (XLA_FFI_TypeId){0});
    return NULL;
  }
  atomic_fetch_add_explicit(&executions, 1, memory_order_relaxed);
  XLA_FFI_State_Get_Args found = {XLA_FFI_State_Get_Args_STRUCT_SIZE, NULL,           frame->ctx,
                                  XLA_FFI_ExecutionStage_INSTANTIATE, &platform->type, NULL};
  XLA_FFI_Error *error = frame->api->XLA_FFI_State_Get(&found);
  if (error) return error;
  const State *state = found.state;
  XLA_FFI_Stream_Get_Args on = {XLA_FFI_Stream_Get_Args_STRUCT_SIZE, NULL, frame->ctx, NULL};
  error = platform == &host ? NULL : frame->api->XLA_FFI_Stream_Get(&on); /* another one while a graph is captured */
  if (error) return error;
  void *at[SLOTS] = {NULL};
  error = place(frame, state, "operand", frame->args.size, frame->args.args, state->operand_count, state->operands, at);
  if (error) return error;
  error = place(frame, state, "result", frame->rets.size, frame->rets.rets, state->result_count, state->results, at);
  if (error) return error;
  int ordinal = state->ordinal;
  error = ordinal_of(frame, &ordinal);
  if (error) return error;
  void *handle = NULL; /* the program's own */
  int status = ordinal == state->ordinal ? 0 : other_handle(platform, ordinal, &handle);
  if (!status) {
    int reads_c = at[C] && state->beta != 0.0;
    Arrays arrays = {at[A], at[B], reads_c ? at[C] : at[OUT], at[OUT], at[BIAS], at[AUX], at[WORKSPACE]};
    status = program_launch(state->program, handle, &arrays, state->alpha, reads_c ? state->beta : 0.0, on.stream);
  }
  if (status)
    FAILED(frame, INTERNAL, "fusedops: cuBLASLt answered %s (%d) on device %d to %s", status_name(status), status,
           ordinal, state->text);
  return NULL;
}

/* What XLA and Python call ---------------------------------------------------------------------------------------- */

XLA_FFI_Error *cuda_instantiate(XLA_FFI_CallFrame *frame) { return instantiate(frame, &cuda); }
XLA_FFI_Error *cuda_execute(XLA_FFI_CallFrame *frame) { return execute(frame, &cuda); }
XLA_FFI_Error *host_instantiate(XLA_FFI_CallFrame *frame) { return instantiate(frame, &host); }
XLA_FFI_Error *host_execute(XLA_FFI_CallFrame *frame) { return execute(frame, &host); }

/* Set who plans for a platform, and its cublasLtCreate. After NULL no call to the old provider begins, and it is safe
 * to unload once `handler_in_flight` is 0. */
void handler_serve(int is_cuda, Provider provider, int (*create)(void **handle)) {
  Platform *platform = is_cuda ? &cuda : &host;
  if (create) atomic_store(&platform->create, create);
  atomic_store(&platform->provider, provider);
}

long handler_in_flight(void) { return atomic_load(&in_flight); }
long handler_instantiations(void) { return atomic_load(&instantiations); }
long handler_executions(void) { return atomic_load(&executions); }
long handler_live_states(void) { return atomic_load(&live_states); }
long handler_holders(void) { return atomic_load(&holders); } /* references to states that executables have */
