//! The buffers of a sharded module: what they are, and how they are saved and loaded.

use burn::module::AutodiffModule;
use burn_backend::TensorData;
use deepburn_ops::OptimizerOps;

use super::ModelStates;
use super::pieces::{Elements, OwnedArray, host_range};
use crate::array::flat_range;
use crate::buffers::Buffer;
use crate::error::ZeroError;
use crate::sharding::Training;
use deepburn_comm::Partition;

/// Everything here takes the module that [`ModelStates::shard`] returned, or what later calls made
/// of it: buffers live in the module.
impl<B: OptimizerOps> ModelStates<B> {
    /// The buffers, in the order of the module: running statistics, integer and bool parameters.
    pub fn buffers(&self) -> &[Buffer] {
        self.buffers.all()
    }

    /// Averages running statistics over the ranks, so that all hold the same values: after each
    /// backward pass, and before the module is evaluated or saved. All ranks call this together.
    /// Does nothing, without a message, where the module has no running statistics.
    ///
    /// An element that is infinite or NaN after an update counts with the value that it had before.
    ///
    /// # Errors
    /// When a statistic has changed its shape, the module is another one, or the collective fails.
    pub fn agree_buffers<M: AutodiffModule<Training<B>>>(
        &self,
        module: &M,
    ) -> Result<(), ZeroError> {
        self.buffers.agree(module)
    }

    /// The values of the buffer at `path`, in its own type (bools in one byte each); those of a
    /// running statistic as the ranks agreed on them last. No collective.
    ///
    /// # Errors
    /// When the module has no buffer of that path, or is another one.
    pub fn buffer_data<M: AutodiffModule<Training<B>>>(
        &self,
        module: &M,
        path: &str,
    ) -> Result<TensorData, ZeroError> {
        let index = self.buffers().iter().position(|buffer| buffer.path() == path);
        let index = index.ok_or_else(|| ZeroError::UnknownBuffer { path: path.to_owned() })?;
        self.buffers.data(module, index)
    }

    /// The elements that this rank saves of each buffer, which is the cut of parameters
    /// ([`Partition::owned`](crate::Partition::owned)), flat: values that the ranks agreed on last.
    ///
    /// # Errors
    /// When this is another module.
    pub fn owned_buffers<M: AutodiffModule<Training<B>>>(
        &self,
        module: &M,
    ) -> Result<Vec<OwnedArray<B>>, ZeroError> {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        let owned = self.buffers().iter().enumerate().map(|(index, buffer)| {
            let range = Partition::new(buffer.numel(), ranks).owned(rank);
            Ok(OwnedArray(match self.buffers.statistic(index) {
                Some(tensor) => Elements::Float(flat_range::<B>(&tensor, range)),
                None => Elements::Host(host_range(&self.buffers.data(module, index)?, range)),
            }))
        });
        owned.collect()
    }

    /// Returns the module with the values that `read` gives for each buffer, whole and flat; a
    /// buffer for which it gives none keeps its values. Nothing is changed where `read` fails.
    ///
    /// # Errors
    /// Those of `read`, or values of another number.
    pub fn load_buffers<M: AutodiffModule<Training<B>>, E: From<ZeroError>>(
        &self,
        module: &M,
        mut read: impl FnMut(&Buffer) -> Result<Option<TensorData>, E>,
    ) -> Result<M, E> {
        let values = self.buffers().iter().map(|buffer| {
            let Some(data) = read(buffer)? else { return Ok(None) };
            let (found, expected) = (data.num_elements(), buffer.numel());
            if found != expected {
                let (path, array) = (buffer.path().to_owned(), "values");
                return Err(ZeroError::PieceLength { path, array, found, expected }.into());
            }
            let data = TensorData { shape: buffer.shape().clone(), ..data };
            Ok(Some(data.convert_dtype(buffer.dtype())))
        });
        let values = values.collect::<Result<_, E>>()?;
        Ok(self.buffers.install(module.clone(), values))
    }
}
