//! The op families on [`Meta`], the backend without data: the shapes and types of all results.
//!
//! A dry run counts the memory of a training step from these results, so each op returns what the
//! flex kernels return, also in the types: statistics, log-sums and the gradients of the loss head
//! are in at least f32. Memory inside a kernel is not represented.

mod fused;
mod optimizer;

use std::any::TypeId;

use burn_backend::{Backend, DType, TensorMetadata};
use deepburn_meta::{Meta, MetaTensor, Work, report_work};

/// Returns true if the tensors of `B` have no values.
///
/// Code that copies tensors to host memory and computes there has nothing to do on such a backend.
pub fn is_without_data<B: Backend>() -> bool {
    TypeId::of::<B>() == TypeId::of::<Meta>()
}

/// Reports the work of an op that reads and writes these tensors.
fn report<const N: usize>(operations: u64, moved: [&MetaTensor; N]) {
    report_work(|| {
        let bytes = moved.map(|tensor| tensor.shape().num_elements() * tensor.dtype().size());
        let bytes = bytes.into_iter().sum::<usize>() as u64;
        Work { operations, bytes, ..Work::default() }
    });
}

/// Returns the type in which kernels accumulate: f64 for f64, and otherwise f32.
fn accumulated(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}
