//! Tests of whole jobs: with a fake `mpirun`, with Open MPI, and on several machines, which are
//! network namespaces.

mod fake;
mod launcher;
mod machines;
mod openmpi;
