//! The scope of checkpoints: the parameters that they contain.
//!
//! By default, a checkpoint contains all parameters. [`Engine::omit_base`] limits the scope to
//! those that cannot be read again from a base model. An omitted parameter is frozen and has the
//! values of the base model. Its entry has a hash of these values in the type in which they are
//! held ([`BaseValues`]), which does not depend on ranks, stage and offload.
//!
//! The values decide, and not the history of a run: a parameter that was trained before it was
//! frozen differs from the base model, so it is contained. Frozen parameters only change when a
//! checkpoint is loaded, so they are hashed once and after a load.
//!
//! A checkpoint with omitted parameters is loaded into an engine that was built with the weights of
//! the base model; `finetune` builds it from the pretrained folder, and `deepburn consolidate`
//! reads the parameters from there. It is refused if a hash differs, before anything is changed.
//! Each parameter is gathered separately, and one rank (of its first pipeline stage) hashes it.

use std::collections::BTreeMap;

use burn::module::AutodiffModule;
use deepburn_checkpoint::{BaseValues, Checkpoint};
use deepburn_ops::OptimizerOps;
use deepburn_weights::{Origin, WeightMap};
use deepburn_zero::Training;

use super::element::element_type;
use super::{TrainingCheckpointError, entry_of, unfit};
use crate::exchange::exchange;
use crate::{Engine, EngineError};

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Omits the frozen parameters of a base model from later checkpoints. These are the parameters
    /// with the origin [`Origin::Frozen`] in `map`, as long as they are frozen and unchanged. All
    /// ranks call this together, while the engine has the values of the base model: before a
    /// checkpoint is loaded. [`weight_map`](Self::weight_map) returns a map to start from.
    ///
    /// Such a checkpoint can only be loaded into an engine that was built with the same values.
    /// Without this call, checkpoints contain all parameters.
    ///
    /// # Errors
    /// Returns an error if a collective or a disk fails, and between forward and backward.
    pub fn omit_base(&mut self, map: &WeightMap) -> Result<(), TrainingCheckpointError> {
        self.check_settled("omit_base")?;
        let is_in_base =
            |path: &str| map.get(path).is_some_and(|it| *it.origin() == Origin::Frozen);
        let parameters = self.parameters().iter();
        let frozen = parameters.filter(|it| !it.is_trainable() && is_in_base(it.path()));
        self.omitted = self.hashed(&frozen.map(|it| it.index()).collect::<Vec<_>>())?;
        Ok(())
    }

    /// Checks that this engine has the values of the parameters that `checkpoint` omits. All ranks
    /// call this together and get the same result.
    ///
    /// # Errors
    /// Returns [`TrainingCheckpointError::Unfit`] for the first parameter with other values, or an
    /// error if a collective fails.
    pub(super) fn check_base(
        &self,
        checkpoint: &Checkpoint,
    ) -> Result<(), TrainingCheckpointError> {
        let expected = self.parameters().iter().filter_map(|parameter| {
            let entry = entry_of(checkpoint, parameter.path())?;
            Some((parameter.index(), entry.base.as_ref()?))
        });
        let expected: BTreeMap<usize, &BaseValues> = expected.collect();
        let is_unknown = |index: &&usize| !self.omitted.contains_key(index);
        let hashed =
            self.hashed(&expected.keys().filter(is_unknown).copied().collect::<Vec<_>>())?;
        for (index, base) in expected {
            let found = self.omitted.get(&index).unwrap_or_else(|| &hashed[&index]);
            base.check(self.parameters()[index].path(), found)
                .map_err(|error| unfit(checkpoint.path(), error.to_string()))?;
        }
        Ok(())
    }

    /// Hashes the omitted parameters again that `is_loaded` says were loaded. Those that differ
    /// from the base model are not omitted any more. All ranks call this together.
    ///
    /// # Errors
    /// Returns an error if a collective or a disk fails.
    pub(super) fn keep_unchanged_base(
        &mut self,
        is_loaded: impl Fn(&str) -> bool,
    ) -> Result<(), TrainingCheckpointError> {
        let omitted = self.omitted.keys().copied();
        let loaded: Vec<usize> =
            omitted.filter(|index| is_loaded(self.parameters()[*index].path())).collect();
        let now = self.hashed(&loaded)?;
        self.omitted.retain(|index, base| now.get(index).is_none_or(|now| now == base));
        Ok(())
    }

    /// Returns the hashes of the current values of parameters, by index; of a quantized parameter,
    /// the hash of the values before they were quantized. All ranks call this together.
    fn hashed(
        &self,
        indices: &[usize],
    ) -> Result<BTreeMap<usize, BaseValues>, TrainingCheckpointError> {
        if indices.is_empty() {
            return Ok(BTreeMap::new());
        }
        let group = self.states().data_group();
        let mut own = Vec::new();
        for (place, &index) in indices.iter().enumerate() {
            let parameter = &self.parameters()[index];
            if !parameter.is_owned_here() {
                continue;
            }
            // The parameters are divided among the ranks, each of which hashes only a part of the
            // model.
            let is_own = place % group.world_size() == group.rank();
            if let Some(original) = parameter.original_hash() {
                if is_own {
                    let element = element_type(self.states().compute_type())?;
                    own.push((index, BaseValues::with_hash(element, original)));
                }
                continue;
            }
            // All ranks take part in the gather of a sharded parameter.
            if is_own || self.states().stage().shards_parameters() {
                let data = self.states().stage_parameter_data(index).map_err(EngineError::from)?;
                if is_own {
                    own.push((index, BaseValues::of(element_type(data.dtype)?, data.as_bytes())));
                }
            }
        }
        let own = Ok::<_, TrainingCheckpointError>(own);
        let all = exchange(self.group(), "hashes of frozen parameters", Some(own))?;
        Ok(all.into_iter().flatten().collect())
    }
}
