//! Stores updated parameters, and hands them round where every rank keeps them whole (stages 1 and
//! 2).

use std::sync::Arc;

use burn_backend::Backend;
use deepburn_comm::{CommError, Tag};
use deepburn_config::Stage;

use crate::array::DeviceArray;
use crate::group::Group;
use crate::parameter::Parameter;
use crate::sharding::in_shape;

/// All-gathers updated shards into whole parameters, many in one message.
pub(crate) struct Publisher<'a, B: Backend> {
    group: &'a Group<B>,
    bucket_size: usize,
    bucket: Vec<(Arc<Parameter<B>>, B::FloatTensorPrimitive)>,
}

impl<'a, B: Backend> Publisher<'a, B> {
    pub(crate) fn new(group: &'a Group<B>, bucket_size: usize) -> Self {
        Self { group, bucket_size, bucket: Vec::new() }
    }

    /// Stores what a rank has updated of a parameter; its whole values where ranks keep those.
    pub(crate) fn store(
        &mut self,
        stage: Stage,
        parameter: &Arc<Parameter<B>>,
        updated: B::FloatTensorPrimitive,
    ) -> Result<(), CommError> {
        match stage {
            Stage::Disabled => parameter.put(in_shape::<B>(updated, parameter.shape())),
            Stage::Parameters => parameter.put(updated),
            Stage::OptimizerStates | Stage::Gradients => self.enter(parameter, updated)?,
        }
        Ok(())
    }

    fn enter(
        &mut self,
        parameter: &Arc<Parameter<B>>,
        shard: B::FloatTensorPrimitive,
    ) -> Result<(), CommError> {
        let held: usize = self.bucket.iter().map(|(parameter, _)| parameter.numel()).sum();
        if held > 0 && held + parameter.numel() > self.bucket_size {
            self.flush()?;
        }
        self.bucket.push((parameter.clone(), shard));
        Ok(())
    }

    pub(crate) fn flush(&mut self) -> Result<(), CommError> {
        let Some((first, _)) = self.bucket.first() else {
            return Ok(());
        };
        let tag = Tag::new("updated parameters", first.index() as u64)
            .naming(self.bucket.iter().map(|(parameter, _)| parameter.shared_path()));
        let numels = self.bucket.iter().map(|(parameter, _)| parameter.numel()).collect();
        let (parameters, shards): (Vec<_>, Vec<_>) = self
            .bucket
            .drain(..)
            .map(|(parameter, shard)| (parameter, DeviceArray::Dense(shard)))
            .unzip();
        let whole = self.group.arrays().all_gather(tag, shards, numels)?.wait()?;
        for (parameter, array) in parameters.into_iter().zip(whole) {
            parameter.put(in_shape::<B>(array.into_flat(), parameter.shape()));
        }
        Ok(())
    }
}
