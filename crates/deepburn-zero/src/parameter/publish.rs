//! Stores updated parameters, and all-gathers them at stages 1 and 2, where every rank keeps the
//! whole parameters.
//!
//! Main type: `Publisher`. It collects updated shards in a bucket, so that many parameters share a
//! collective. A bucket has at most `allgather_bucket_size` elements, or one parameter:
//!
//! ```text
//! store p0, p1, p2 (bucket full) ─► all-gather [p0, p1] ─► whole p0, p1 ─► store p3 .. ─► flush
//! ```
//!
//! A parameter of the bucket gets its new values when the all-gather is complete. All ranks store
//! the same parameters in the same order, so their buckets match.

use std::sync::Arc;

use deepburn_comm::{CollectiveTag, CommError};
use deepburn_config::Stage;
use deepburn_ops::SumOps;

use crate::group::{DeviceArray, Group};
use crate::parameter::Parameter;

/// All-gathers updated shards into whole parameters, many in one message.
pub(crate) struct Publisher<'a, B: SumOps> {
    /// The ranks of the shard group.
    group: &'a Group<B>,
    /// The largest number of elements in a bucket, counted in whole parameters.
    bucket_size: usize,
    /// The parameters of the bucket with this rank's updated shards.
    bucket: Vec<(Arc<Parameter<B>>, B::FloatTensorPrimitive)>,
}

impl<'a, B: SumOps> Publisher<'a, B> {
    /// Creates a publisher for the shard group, with an empty bucket.
    pub(crate) fn new(group: &'a Group<B>, bucket_size: usize) -> Self {
        Self { group, bucket_size, bucket: Vec::new() }
    }

    /// Stores the values that this rank has updated: the whole parameter at stage 0, and the shard
    /// at stage 3. At stages 1 and 2, the shard is added to the bucket, and the whole parameter is
    /// stored after the all-gather.
    ///
    /// # Errors
    /// Returns an error if the all-gather of a full bucket fails.
    pub(crate) fn store(
        &mut self,
        stage: Stage,
        parameter: &Arc<Parameter<B>>,
        updated: B::FloatTensorPrimitive,
    ) -> Result<(), CommError> {
        match stage {
            // At stage 0, every rank has updated all elements, so nothing is gathered.
            Stage::Disabled => parameter.put(B::float_reshape(updated, parameter.shape().clone())),
            Stage::Parameters => parameter.put(updated),
            Stage::OptimizerStates | Stage::Gradients => self.enter(parameter, updated)?,
        }
        Ok(())
    }

    /// Adds a shard to the bucket, which is gathered first if the parameter does not fit.
    fn enter(
        &mut self,
        parameter: &Arc<Parameter<B>>,
        shard: B::FloatTensorPrimitive,
    ) -> Result<(), CommError> {
        let held: usize = self.bucket.iter().map(|(parameter, _)| parameter.numel()).sum();
        // A parameter larger than the bucket gets a separate all-gather.
        if held > 0 && held + parameter.numel() > self.bucket_size {
            self.flush()?;
        }
        self.bucket.push((parameter.clone(), shard));
        Ok(())
    }

    /// Gathers the remaining parameters in the bucket. All ranks must call this after the last
    /// parameter.
    ///
    /// # Errors
    /// Returns an error if the all-gather fails.
    pub(crate) fn flush(&mut self) -> Result<(), CommError> {
        let Some((first, _)) = self.bucket.first() else {
            return Ok(());
        };
        // The tag names the parameters, so that the error message shows them if ranks have
        // different buckets.
        let tag = CollectiveTag::new("updated parameters", first.index() as u64)
            .naming(self.bucket.iter().map(|(parameter, _)| parameter.shared_path()));
        let numels = self.bucket.iter().map(|(parameter, _)| parameter.numel()).collect();
        let (parameters, shards): (Vec<_>, Vec<_>) = self
            .bucket
            .drain(..)
            .map(|(parameter, shard)| (parameter, DeviceArray::Dense(shard)))
            .unzip();
        let whole = self.group.arrays().all_gather(tag, shards, numels)?.wait()?;
        for (parameter, array) in parameters.into_iter().zip(whole) {
            parameter.put(B::float_reshape(array.into_flat(), parameter.shape().clone()));
        }
        Ok(())
    }
}
