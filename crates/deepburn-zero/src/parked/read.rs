//! Reads parked arrays whole.

use burn_backend::{AllocationProperty, Backend, Bytes, DType, TensorData};
use deepburn_nvme::{Buffer, PendingIo, SwapError};
use deepburn_ops::float_from_host;

use super::{ParkedArray, ParkedData, PieceLayout, copied, lock};

/// A parked array on its way into memory.
#[derive(Debug)]
pub(crate) struct ParkedRead {
    source: ReadFrom,
    layout: PieceLayout,
    dtype: DType,
}

#[derive(Debug)]
enum ReadFrom {
    Memory(Vec<u8>),
    Disk(PendingIo),
}

/// A parked array and the type of its elements: what can be read of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ParkedTensor<'a> {
    pub(crate) array: &'a ParkedArray,
    pub(crate) dtype: DType,
}

impl ParkedTensor<'_> {
    /// Starts to read all elements.
    ///
    /// # Errors
    /// There is no memory for a buffer, or an earlier write failed.
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
                let last = layout.pieces().last();
                let end = last.map_or(0, |last| layout.extent(&last, dtype.size()).end);
                ReadFrom::Disk(file.read(region, 0..end)?)
            }
        };
        Ok(ParkedRead { source, layout, dtype })
    }

    /// All elements as a flat tensor.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn read<B: Backend>(
        self,
        device: &B::Device,
    ) -> Result<B::FloatTensorPrimitive, SwapError> {
        self.start()?.wait::<B>(device)
    }
}

impl ParkedRead {
    /// All elements as a flat tensor. On a backend whose device is the host the tensor lies in the memory
    /// that the disk was read into.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn wait<B: Backend>(
        self,
        device: &B::Device,
    ) -> Result<B::FloatTensorPrimitive, SwapError> {
        let Self { source, layout, dtype } = self;
        let bytes = match source {
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

/// Moves the pieces of an array together. There are gaps only where a piece does not end at a multiple of
/// the alignment.
fn close_gaps(buffer: &mut Buffer, layout: PieceLayout, size: usize) {
    for piece in layout.pieces() {
        let (from, to) = (layout.extent(&piece, size).start, piece.start * size);
        if from != to {
            buffer.as_mut_bytes().copy_within(from..from + piece.len() * size, to);
        }
    }
}

/// A buffer that a tensor lies in.
struct TensorBytes {
    buffer: Buffer,
    bytes: usize,
}

impl AsRef<[u8]> for TensorBytes {
    fn as_ref(&self) -> &[u8] {
        &self.buffer.as_bytes()[..self.bytes]
    }
}
