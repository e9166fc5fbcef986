//! Access to the buffers of a sharded module, for evaluation and checkpoints.

use burn_backend::TensorData;
use deepburn_ops::OptimizerOps;

use super::ModelStates;
use super::segments::{Elements, OwnedArray, host_range};
use crate::decorator::Training;
use crate::error::ZeroError;
use crate::group::flat::flat_range;
use crate::module::AutodiffModule;
use crate::sharding::Buffer;
use deepburn_comm::Partition;

/// Methods for buffers. They take the module that [`ModelStates::shard`] or a later call has
/// returned, because the module holds the values of its buffers.
impl<B: OptimizerOps> ModelStates<B> {
    /// Returns the buffers in module order: running statistics, integer and bool parameters.
    pub fn buffers(&self) -> &[Buffer] {
        self.module.buffers.all()
    }

    /// Averages running statistics over the ranks. All ranks call this together after each backward
    /// pass, and before the module is evaluated or saved. Without running statistics, nothing is
    /// exchanged.
    ///
    /// If an element is infinite or NaN after an update, the average uses its previous value.
    ///
    /// # Errors
    /// Returns an error if the shape of a statistic has changed, if this is a different module, or
    /// if the collective fails.
    pub fn agree_buffers<M: AutodiffModule<Training<B>>>(
        &self,
        module: &M,
    ) -> Result<(), ZeroError> {
        self.module.buffers.agree(module)
    }

    /// Returns the values of the buffer at `path` in the type of the buffer; a bool is one byte.
    /// For a running statistic, it returns the last average. Uses no collective.
    ///
    /// # Errors
    /// Returns an error if the module has no such buffer, or if it is a different module.
    pub fn buffer_data<M: AutodiffModule<Training<B>>>(
        &self,
        module: &M,
        path: &str,
    ) -> Result<TensorData, ZeroError> {
        let index = self.buffers().iter().position(|buffer| buffer.path() == path);
        let index = index.ok_or_else(|| ZeroError::UnknownBuffer { path: path.to_owned() })?;
        self.module.buffers.data(module, index)
    }

    /// Returns the flat elements of each buffer that this rank saves. Buffers are partitioned like
    /// parameters ([`Partition::owned`](crate::Partition::owned)). For running statistics, the
    /// elements of the last average are returned.
    ///
    /// # Errors
    /// Returns an error if this is a different module.
    pub fn owned_buffers<M: AutodiffModule<Training<B>>>(
        &self,
        module: &M,
    ) -> Result<Vec<OwnedArray<B>>, ZeroError> {
        let (rank, ranks) = (self.groups.shard().rank(), self.groups.shard().world_size());
        let owned = self.buffers().iter().enumerate().map(|(index, buffer)| {
            let range = Partition::new(buffer.numel(), ranks).owned(rank);
            Ok(OwnedArray(match self.module.buffers.statistic(index) {
                Some(tensor) => Elements::Float(flat_range::<B>(&tensor, range)),
                None => {
                    Elements::Host(host_range(&self.module.buffers.data(module, index)?, range))
                }
            }))
        });
        owned.collect()
    }

    /// Returns the module with new values of its buffers. `read` returns the complete, flat values
    /// of a buffer, or `None` to leave it unchanged. If `read` fails, nothing is changed.
    ///
    /// # Errors
    /// Returns the errors of `read`, or an error for a wrong number of values.
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
                return Err(ZeroError::SegmentLength { path, array, found, expected }.into());
            }
            let data = TensorData { shape: buffer.shape().clone(), ..data };
            Ok(Some(data.convert_dtype(buffer.dtype())))
        });
        // All values are read before the first buffer changes.
        let values = values.collect::<Result<_, E>>()?;
        Ok(self.module.buffers.install(module.clone(), values))
    }
}
