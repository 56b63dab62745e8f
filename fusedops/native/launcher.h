/* A planned product that C can launch: an operation descriptor, four layouts, an algorithm.
 *
 * No CUDA header is read: cuBLASLt is reached through the addresses of its functions, which Python passes in, and its
 * objects are opaque pointers. Addresses of arrays are in the caller's row-major terms, as in `Program.launch` of the
 * Python engine: `b` is what cuBLASLt calls A, `a` its B.
 */
#ifndef FUSEDOPS_LAUNCHER_H
#define FUSEDOPS_LAUNCHER_H

#include <stddef.h>
#include <stdint.h>

typedef struct Library Library;       /* the functions of one cuBLASLt */
typedef struct Descriptor Descriptor; /* an operation descriptor, the lock of the pointers in it, a count of its users */
typedef struct Program Program;       /* immutable but for its count of users */

typedef struct {
  const void *a, *b, *c; /* c is out where there is no c */
  void *out;
  void *bias;      /* where a bias is read or a sum is written; NULL: there is none */
  void *aux;       /* where a mask or pre-activation is read or written; NULL: there is none */
  void *workspace; /* NULL where the program needs none */
} Arrays;

/* Queue a product on a stream; returns a cublasStatus_t, 0 for success. `handle` NULL is the program's own. Any thread
 * may call it with any program; it takes the descriptor's lock for the length of the call. */
int program_launch(Program *program, void *handle, const Arrays *arrays, double alpha, double beta, void *stream);

size_t program_workspace(const Program *program);

void program_retain(Program *program);
void program_release(Program *program);

#endif
