//! Jobs from their start to their end: with a stand-in for `mpirun`, with Open MPI, and on machines
//! that are network namespaces.

mod fake;
mod launcher;
mod machines;
mod openmpi;
