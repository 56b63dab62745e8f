/* The launcher: programs that C and Python launch alike.
 *
 * The C API of Python is reached through addresses too, so the same object loads where there is no Python, and one
 * built object serves every version of it.
 */
#include "launcher.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define ALGORITHM_WORDS 8 /* of 8 bytes, in a cublasLtMatmulAlgo_t */
#define MATRICES 4        /* A, B, C, D */
#define LAYOUT_WORDS 7    /* type, rows, cols, ld, order, batch count, batch stride */

enum { ALLOC_FAILED = 3, REFUSED = -1 };                                  /* a cublasStatus_t, and the check's answer */
enum { BIAS_POINTER = 8, AUX_POINTER = 11 };                              /* cublasLtMatmulDescAttributes_t */
enum { LAYOUT_ORDER = 1, LAYOUT_BATCH_COUNT = 5, LAYOUT_BATCH_STRIDE = 6 }; /* cublasLtMatrixLayoutAttribute_t */

/* cublasLtMatmulHeuristicResult_t */
typedef struct {
  uint64_t algorithm[ALGORITHM_WORDS];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} HeuristicResult;

struct Library {
  int (*matmul)(void *handle, void *descriptor, const void *alpha, const void *A, void *layout_A, const void *B,
                void *layout_B, const void *beta, const void *C, void *layout_C, void *D, void *layout_D,
                const uint64_t *algorithm, void *workspace, size_t workspace_size, void *stream);
  int (*descriptor_set)(void *descriptor, int attribute, const void *value, size_t size);
  int (*descriptor_destroy)(void *descriptor);
  int (*layout_create)(void **layout, int type, uint64_t rows, uint64_t cols, int64_t ld);
  int (*layout_set)(void *layout, int attribute, const void *value, size_t size);
  int (*layout_destroy)(void *layout);
  int (*algorithm_check)(void *handle, void *descriptor, void *layout_A, void *layout_B, void *layout_C, void *layout_D,
                         const uint64_t *algorithm, HeuristicResult *result);
};

struct Descriptor {
  const Library *library;
  void *pointer;
  pthread_mutex_t lock;
  atomic_long users;
};

struct Program {
  const Library *library;
  void *handle;
  Descriptor *descriptor;
  void *layouts[MATRICES];
  uint64_t algorithm[ALGORITHM_WORDS];
  size_t workspace;
  int scale_is_double;
  atomic_long users;
};

/* Making and freeing ---------------------------------------------------------------------------------------------- */

/* Return the functions of a cuBLASLt, given in the order of the fields, or NULL; it is never freed. */
Library *library_new(void *matmul, void *descriptor_set, void *descriptor_destroy, void *layout_create,
                     void *layout_set, void *layout_destroy, void *algorithm_check) {
  Library *library = malloc(sizeof *library);
  void *addresses[] = {matmul,     descriptor_set, descriptor_destroy, layout_create,
                       layout_set, layout_destroy, algorithm_check};
  _Static_assert(sizeof addresses == sizeof *library, "a field for each address");
  if (library) memcpy(library, addresses, sizeof addresses); /* ISO C converts no object pointer to a function's */
  return library;
}

/* Return a descriptor that owns a cublasLtMatmulDesc_t; or NULL, and the caller still owns it. */
Descriptor *descriptor_new(const Library *library, void *pointer) {
  Descriptor *descriptor = calloc(1, sizeof *descriptor);
  if (!descriptor) return NULL;
  if (pthread_mutex_init(&descriptor->lock, NULL)) {
    free(descriptor);
    return NULL;
  }
  descriptor->library = library;
  descriptor->pointer = pointer;
  atomic_init(&descriptor->users, 1);
  return descriptor;
}

void descriptor_release(Descriptor *descriptor) {
  if (atomic_fetch_sub(&descriptor->users, 1) != 1) return;
  descriptor->library->descriptor_destroy(descriptor->pointer);
  pthread_mutex_destroy(&descriptor->lock);
  free(descriptor);
}

static void program_free(Program *program) {
  for (int i = 0; i < MATRICES; i++)
    if (program->layouts[i]) program->library->layout_destroy(program->layouts[i]);
  descriptor_release(program->descriptor);
  free(program);
}

void program_retain(Program *program) { atomic_fetch_add(&program->users, 1); }

void program_release(Program *program) {
  if (atomic_fetch_sub(&program->users, 1) == 1) program_free(program);
}

size_t program_workspace(const Program *program) { return program->workspace; }

static int layout_new(const Library *library, void **made, const int64_t words[LAYOUT_WORDS]) {
  int32_t order = (int32_t)words[4], count = (int32_t)words[5];
  int status = library->layout_create(made, (int)words[0], (uint64_t)words[1], (uint64_t)words[2], words[3]);
  if (status) {
    *made = NULL;
    return status;
  }
  if (order) status = library->layout_set(*made, LAYOUT_ORDER, &order, sizeof order);
  if (!status && count > 1) status = library->layout_set(*made, LAYOUT_BATCH_COUNT, &count, sizeof count);
  if (!status && count > 1) status = library->layout_set(*made, LAYOUT_BATCH_STRIDE, &words[6], sizeof words[6]);
  return status;
}

/* Return whether the algorithm can run these layouts with at most so much workspace. */
static int runs(const Program *program, size_t limit) {
  HeuristicResult result = {0};
  void *const *layouts = program->layouts;
  pthread_mutex_lock(&program->descriptor->lock);
  int status = program->library->algorithm_check(program->handle, program->descriptor->pointer, layouts[0], layouts[1],
                                                 layouts[2], layouts[3], program->algorithm, &result);
  pthread_mutex_unlock(&program->descriptor->lock);
  return !status && result.workspace <= limit;
}

/* Return a program; or NULL and a status, which is REFUSED where `check` is asked for and says no.
 *
 * `workspace` is what the algorithm was found with, and `spare` what a launch passes beyond it. The descriptor is
 * retained, the rest copied. */
Program *program_new(const Library *library, void *handle, Descriptor *descriptor,
                     const int64_t layouts[MATRICES][LAYOUT_WORDS], const uint64_t algorithm[ALGORITHM_WORDS],
                     size_t workspace, size_t spare, int scale_is_double, int check, int *status) {
  Program *program = calloc(1, sizeof *program);
  *status = ALLOC_FAILED;
  if (!program) return NULL;
  atomic_fetch_add(&descriptor->users, 1);
  program->library = library;
  program->handle = handle;
  program->descriptor = descriptor;
  memcpy(program->algorithm, algorithm, sizeof program->algorithm);
  program->workspace = workspace + spare;
  program->scale_is_double = scale_is_double;
  atomic_init(&program->users, 1);
  *status = 0;
  for (int i = 0; i < MATRICES && !*status; i++) *status = layout_new(library, &program->layouts[i], layouts[i]);
  if (!*status && check && !runs(program, workspace)) *status = REFUSED;
  if (!*status) return program;
  program_free(program);
  return NULL;
}

/* Launching ------------------------------------------------------------------------------------------------------- */

int program_launch(Program *program, void *handle, const Arrays *arrays, double alpha, double beta, void *stream) {
  const Library *library = program->library;
  Descriptor *descriptor = program->descriptor;
  void *const *layouts = program->layouts;
  void *layout_C = layouts[arrays->c == arrays->out ? 3 : 2]; /* one matrix cannot have two layouts */
  double doubles[] = {alpha, beta};
  float floats[] = {(float)alpha, (float)beta};
  const void *at_alpha = program->scale_is_double ? (void *)&doubles[0] : (void *)&floats[0];
  const void *at_beta = program->scale_is_double ? (void *)&doubles[1] : (void *)&floats[1];
  int status = 0;
  pthread_mutex_lock(&descriptor->lock);
  if (arrays->bias)
    status = library->descriptor_set(descriptor->pointer, BIAS_POINTER, &arrays->bias, sizeof arrays->bias);
  if (!status && arrays->aux)
    status = library->descriptor_set(descriptor->pointer, AUX_POINTER, &arrays->aux, sizeof arrays->aux);
  if (!status)
    status = library->matmul(handle ? handle : program->handle, descriptor->pointer, at_alpha, arrays->b, layouts[0],
                             arrays->a, layouts[1], at_beta, arrays->c, layout_C, arrays->out, layouts[3],
                             program->algorithm, arrays->workspace, program->workspace, stream);
  pthread_mutex_unlock(&descriptor->lock);
  return status;
}

/* Python ---------------------------------------------------------------------------------------------------------- */

enum { PROGRAM, A, B, C, OUT, BIAS, AUX, WORKSPACE, ALPHA, BETA, STREAM, ARGUMENTS };

/* What the builtin needs of Python's stable ABI. */
static struct {
  unsigned long long (*as_address)(void *object); /* PyLong_AsUnsignedLongLong */
  double (*as_double)(void *object);              /* PyFloat_AsDouble */
  void *(*error_occurred)(void);                  /* PyErr_Occurred, borrowed */
  void *(*long_from)(long value);                 /* PyLong_FromLong */
  void (*decref)(void *object);                   /* Py_DecRef */
  void (*incref)(void *object);                   /* Py_IncRef */
  void (*set_error)(void *type, void *value);     /* PyErr_SetObject */
  void (*set_message)(void *type, const char *);  /* PyErr_SetString */
  void *(*save_thread)(void);                     /* PyEval_SaveThread */
  void (*restore_thread)(void *state);            /* PyEval_RestoreThread */
  void *type_error;                               /* PyExc_TypeError */
  void *none;                                     /* Py_None */
} python;

/* launch(program, a, b, c, out, bias, aux, workspace, alpha, beta, stream): None, or `self` raised with the status. */
static void *launch(void *self, void *const *arguments, ptrdiff_t count) {
  void *at[ARGUMENTS] = {0};
  double factors[2];
  if (count != ARGUMENTS) {
    python.set_message(python.type_error, "launch takes program, a, b, c, out, bias, aux, workspace, alpha, beta, stream");
    return NULL;
  }
  for (int i = 0; i < ARGUMENTS; i++) {
    if (i == ALPHA || i == BETA) {
      factors[i - ALPHA] = python.as_double(arguments[i]);
      if (factors[i - ALPHA] == -1.0 && python.error_occurred()) return NULL;
    } else {
      unsigned long long address = python.as_address(arguments[i]);
      if (address == (unsigned long long)-1 && python.error_occurred()) return NULL;
      at[i] = (void *)(uintptr_t)address;
    }
  }
  if (!at[PROGRAM]) {
    python.set_message(python.type_error, "launch: program is 0, expected the address of one");
    return NULL;
  }
  Arrays arrays = {at[A], at[B], at[C], at[OUT], at[BIAS], at[AUX], at[WORKSPACE]};
  void *state = python.save_thread(); /* the queue may be full, and the lock taken */
  int status = program_launch(at[PROGRAM], NULL, &arrays, factors[0], factors[1], at[STREAM]);
  python.restore_thread(state);
  if (!status) {
    python.incref(python.none);
    return python.none;
  }
  void *value = python.long_from(status);
  if (value) {
    python.set_error(self, value);
    python.decref(value);
  }
  return NULL;
}

/* PyMethodDef, which PyCFunction_NewEx reads for as long as the builtin lives. */
static struct {
  const char *name;
  void *(*function)(void *, void *const *, ptrdiff_t);
  int flags;
  const char *doc;
} method = {"launch", launch, 0x0080 /* METH_FASTCALL */,
            "launch(program, a, b, c, out, bias, aux, workspace, alpha, beta, stream)\n--\n\n"
            "Queue a program on a stream; all are addresses but the two factors."};

/* Take the addresses in the order of the fields of `python`, and return the method's definition. */
void *python_setup(void *const addresses[]) {
  memcpy(&python, addresses, sizeof python);
  return &method;
}
