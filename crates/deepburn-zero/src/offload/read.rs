//! Reads complete parked arrays as flat tensors.
//!
//! Starting a read and waiting for it are separate calls, so a gather can start the read early and
//! wait when the parameter is needed. On a CPU backend, the tensor uses the buffer that the file
//! was read into. The padding between chunks is removed in place, and the buffer returns to its
//! pool when the tensor is dropped. At the end of a pass, the pool returns idle buffers to the
//! system.

use burn_backend::{AllocationProperty, Bytes, DType, Shape, TensorData};
use deepburn_nvme::{AlignedBuffer, PendingIo, SwapError};
use deepburn_ops::{SumOps, float_from_host};

use super::{ChunkLayout, ParkedArray, ParkedData, copied, lock};

/// A parked array that is being read into memory.
#[derive(Debug)]
pub(crate) struct ParkedRead {
    source: ReadFrom,
    layout: ChunkLayout,
    dtype: DType,
}

/// The progress of a read.
#[derive(Debug)]
enum ReadFrom {
    /// Copied from host memory, so that a later write does not change the tensor.
    Memory(Vec<u8>),
    /// Being read from the file, including the padding of its chunks.
    Disk(PendingIo),
    /// Not read, because there are no elements.
    Absent,
}

/// A parked array and the type of its elements, for a read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ParkedTensor<'a> {
    pub(crate) array: &'a ParkedArray,
    pub(crate) dtype: DType,
}

impl ParkedTensor<'_> {
    /// Starts to read all elements.
    ///
    /// # Errors
    /// Returns an error if a buffer cannot be allocated or an earlier write failed.
    pub(crate) fn start(self) -> Result<ParkedRead, SwapError> {
        let Self { array, dtype } = self;
        let layout = array.layout;
        let source = match &array.data {
            ParkedData::Host(words) => {
                let words = lock(words);
                let bytes: &[u8] = bytemuck::cast_slice(&words);
                ReadFrom::Memory(copied(&bytes[..layout.len * dtype.size()])?)
            }
            ParkedData::Disk { file, region } => {
                let last = layout.chunks().last();
                let end = last.map_or(0, |last| layout.extent(&last, dtype.size()).end);
                ReadFrom::Disk(file.read(region, 0..end)?)
            }
            ParkedData::Absent(_) => {
                array.report_transfers(1, dtype);
                ReadFrom::Absent
            }
        };
        Ok(ParkedRead { source, layout, dtype })
    }

    /// Reads all elements as a flat tensor on `device`.
    ///
    /// # Errors
    /// Returns an error if the disk fails or a buffer cannot be allocated.
    pub(crate) fn read<B: SumOps>(
        self,
        device: &B::Device,
    ) -> Result<B::FloatTensorPrimitive, SwapError> {
        self.start()?.wait::<B>(device)
    }
}

impl ParkedRead {
    /// Waits for all elements and returns them as a flat tensor. On a CPU backend, the tensor uses
    /// the buffer that the file was read into.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    pub(crate) fn wait<B: SumOps>(
        self,
        device: &B::Device,
    ) -> Result<B::FloatTensorPrimitive, SwapError> {
        let Self { source, layout, dtype } = self;
        let bytes = match source {
            ReadFrom::Absent => {
                return Ok(B::float_empty(Shape::from(vec![layout.len]), device, dtype.into()));
            }
            ReadFrom::Memory(bytes) => Bytes::from_bytes_vec(bytes),
            ReadFrom::Disk(pending) => {
                let mut buffer = pending.wait()?;
                close_gaps(&mut buffer, layout, dtype.size());
                let elements = TensorBytes { buffer, bytes: layout.len * dtype.size() };
                Bytes::from_shared(bytes::Bytes::from_owner(elements), AllocationProperty::Native)
            }
        };
        Ok(float_from_host::<B>(TensorData::from_bytes(bytes, [layout.len], dtype), device))
    }
}

/// Removes the padding between the chunks of an array in place. There is padding only if a chunk
/// does not end at a multiple of the alignment.
fn close_gaps(buffer: &mut AlignedBuffer, layout: ChunkLayout, size: usize) {
    for chunk in layout.chunks() {
        // Chunks move toward the start in ascending order, so a chunk never overwrites one that
        // has not been moved yet.
        let (from, to) = (layout.extent(&chunk, size).start, chunk.start * size);
        if from != to {
            buffer.as_mut_bytes().copy_within(from..from + chunk.len() * size, to);
        }
    }
}

/// A buffer whose memory a tensor uses. It returns to its pool when the tensor is dropped.
struct TensorBytes {
    buffer: AlignedBuffer,
    /// The number of bytes of the elements, without padding.
    bytes: usize,
}

impl AsRef<[u8]> for TensorBytes {
    fn as_ref(&self) -> &[u8] {
        &self.buffer.as_bytes()[..self.bytes]
    }
}
