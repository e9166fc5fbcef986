//! Tensors on their way into host memory.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use burn_backend::{Backend, ExecutionError, TensorData, read_sync};
use bytes::Bytes;

use crate::host::{HostBytes, host_bytes};

/// The data of a tensor that is being copied into host memory. Its device runs other ops meanwhile.
///
/// Memory held: the tensor until the copy is complete, and then the copy. A contiguous tensor of flex is its
/// own copy.
pub struct HostRead(ReadProgress);

enum ReadProgress {
    Complete(Bytes),
    Reading(Pin<Box<dyn Future<Output = ReadOutcome> + Send>>),
}

type ReadOutcome = Result<TensorData, ExecutionError>;

impl HostRead {
    /// Starts to read `tensor`.
    ///
    /// # Panics
    /// When the device fails.
    pub fn start<B: Backend>(tensor: B::FloatTensorPrimitive) -> Self {
        if let Some(bytes) = host_bytes(&tensor) {
            return Self(ReadProgress::Complete(bytes));
        }
        let mut reading = Box::pin(B::float_into_data(tensor));
        // A future does nothing before it is polled, and a device starts to copy then.
        Self(match reading.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(outcome) => ReadProgress::Complete(bytes_of(outcome)),
            Poll::Pending => ReadProgress::Reading(reading),
        })
    }

    /// Whether [`wait`](Self::wait) returns at once.
    pub fn is_complete(&self) -> bool {
        matches!(self.0, ReadProgress::Complete(_))
    }

    /// The bytes of the tensor in its flat order, in its own type.
    ///
    /// # Panics
    /// When the device fails.
    pub fn wait(&mut self) -> Bytes {
        let bytes = match &mut self.0 {
            ReadProgress::Complete(bytes) => return bytes.clone(),
            ReadProgress::Reading(reading) => bytes_of(read_sync(reading)),
        };
        self.0 = ReadProgress::Complete(bytes.clone());
        bytes
    }
}

fn bytes_of(outcome: ReadOutcome) -> Bytes {
    match outcome {
        Ok(data) => Bytes::from_owner(HostBytes(data)),
        Err(error) => panic!("reading a tensor from its device failed: {error:?}"),
    }
}
