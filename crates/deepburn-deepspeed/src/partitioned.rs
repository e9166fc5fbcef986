//! Stages 1 and 2: flat groups that are partitioned over the ranks, regardless of parameter
//! boundaries.
//!
//! ```text
//! group:   | wte ........ | wpe ... | ln_1 | c_attn ......... | padding |
//! rank:    |       0           |         1         |         2         |
//! ```
//!
//! All ranks have the same number of elements of a group. The group ends with padding, which the
//! masters omit and the optimizer's arrays include. There may also be padding after each parameter.
//! The model file contains all weights in the working type. Comparing the masters with them proves
//! the order of parameters, and that all files are from one save. The positions in
//! `param_slice_mappings` are not used: they are wrong if DeepSpeed ordered a group by
//! `round_robin_gradients`, which `param_shapes` reflects.

use crate::DeepSpeedError;
use crate::contents::PickleValue;
use crate::model_states_file::{ModelStatesFile, Named};
use crate::optim_states_file::{OptimStatesFile, RankGroup};
use crate::stored::{SavedState, Stored};
use crate::tensor::Segments;

/// The offsets of a group's parameters, and the end of the last one.
struct Offsets {
    /// The offset of each parameter in the group, in elements.
    starts: Vec<usize>,
    /// The number of elements without the padding at the end of the group.
    end: usize,
}

//= deepspeed 0.19.8 utils/zero_to_fp32.py _zero2_merge_trainable_params
/// Assembles the parameters of a checkpoint. `ranks` has the optimizer files of all ranks in order;
/// it is not empty.
///
/// # Errors
/// Returns [`DeepSpeedError::Mixed`] if the files differ in a way in which files of one save do
/// not, [`DeepSpeedError::Unsupported`] without frozen parameters at stage 2, or an error for a
/// missing value.
pub(crate) fn assemble(
    model: &ModelStatesFile,
    ranks: &[OptimStatesFile],
) -> Result<SavedState, DeepSpeedError> {
    let first = &ranks[0];
    // The optimizer for bf16 does not store a stage, and partitions its states as stage 1 does.
    let stage = first.stage.unwrap_or(1);
    if stage == 2 {
        model.refuse_excluded()?;
    }
    let groups = model.groups.as_deref().unwrap_or_default();
    for rank in ranks {
        rank.check(first, ranks.len())?;
        if rank.groups.len() != groups.len() {
            let (found, expected) = (rank.groups.len(), groups.len());
            let path = model.path().display();
            let reason = format!("it has {found} flat groups, where {path} has {expected}");
            return Err(DeepSpeedError::mixed(rank.path(), reason));
        }
    }
    let moments = moment_names(first)?;
    let mut stored = vec![];
    for (group, shapes) in groups.iter().enumerate() {
        stored.extend(of_group(model, ranks, group, shapes)?);
    }
    stored.extend(frozen(model, &stored)?);
    Ok(SavedState { stage, stored, moments, steps: first.steps(), loss_scale: first.loss_scale })
}

/// Returns the names of the optimizer's arrays, which must be the same for all groups.
///
/// # Errors
/// Returns [`DeepSpeedError::Layout`] if groups have different arrays.
pub(crate) fn moment_names(rank: &OptimStatesFile) -> Result<Vec<String>, DeepSpeedError> {
    let names = rank.groups.first().map(|group| group.state.names()).unwrap_or_default();
    if rank.groups.iter().any(|group| group.state.names() != names) {
        return Err(rank.root()?.refuse("of one optimizer with the same arrays for all groups"));
    }
    Ok(names.into_iter().map(str::to_owned).collect())
}

/// Assembles the parameters of one group.
///
/// The group is the concatenation of the parts of all ranks. Each parameter is a range of the
/// group, which may start in the part of one rank and end in the part of the next. The model's own
/// copy is attached, so that reads can check the masters against it.
fn of_group(
    model: &ModelStatesFile,
    ranks: &[OptimStatesFile],
    group: usize,
    shapes: &[Named],
) -> Result<Vec<Stored>, DeepSpeedError> {
    let offsets = Offsets::new(&ranks[0], group, shapes)?;
    let (weights, moments) = join(ranks, group, offsets.end)?;
    if weights.len() != offsets.end {
        let reason = format!(
            "flat group {group} has {} elements over all ranks, where the shapes in {} come to {}",
            weights.len(),
            model.path().display(),
            offsets.end
        );
        return Err(DeepSpeedError::mixed(ranks[0].path(), reason));
    }
    let stored = shapes.iter().zip(&offsets.starts).map(|(named, start)| {
        let range = *start..start + named.1.iter().product::<usize>();
        let cut = |joined: &Segments| joined.cut(range.clone());
        let mut stored = Stored::new(named.clone(), true, cut(&weights));
        stored.moments = moments.iter().map(cut).collect();
        // At these stages the model file contains the complete model, with which each read compares
        // the masters. The weights of a pipeline are in the files of its layers.
        stored.working = model.in_module(&named.0)?.map(Segments::whole);
        Ok(stored)
    });
    stored.collect()
}

/// Concatenates the ranks' parts of a group of `end` elements: the masters and every array of the
/// optimizer.
///
/// # Errors
/// Returns [`DeepSpeedError::Mixed`] if the parts of the ranks do not have equal sizes, or if a
/// part before the end of the group is not full.
fn join(
    ranks: &[OptimStatesFile],
    group: usize,
    end: usize,
) -> Result<(Segments, Vec<Segments>), DeepSpeedError> {
    let mut weights = Segments::default();
    let moments = &ranks[0].groups[group].state.moments;
    let mut moments: Vec<_> = moments.iter().map(|_| Segments::default()).collect();
    let mut partition = None;
    for rank in ranks {
        let RankPartition { used, whole } = RankPartition::new(rank, group)?;
        // All ranks have parts of equal size, and all parts before the end of the group are full.
        let partition = *partition.get_or_insert(whole);
        let expected = partition.min(end.saturating_sub(weights.len()));
        if (whole, used) != (partition, expected) {
            let reason = format!(
                "flat group {group} has {used} elements of {whole} with padding, where {expected} \
                 of {partition} are expected"
            );
            return Err(DeepSpeedError::mixed(rank.path(), reason));
        }
        let state = &rank.groups[group];
        weights.add(state.weights.clone(), used);
        for ((_, tensor), joined) in state.state.moments.iter().zip(&mut moments) {
            joined.add(tensor.clone(), used);
        }
    }
    Ok((weights, moments))
}

/// The offsets are computed from the shapes and, in newer versions of DeepSpeed, from the padding
/// after each parameter (`param_alignment_paddings`).
impl Offsets {
    /// Returns the offsets of the parameters `shapes` in a group. All ranks store the same
    /// paddings, so the file of any rank can be used.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Layout`] if the paddings do not match the parameters.
    fn new(rank: &OptimStatesFile, group: usize, shapes: &[Named]) -> Result<Self, DeepSpeedError> {
        let root = rank.root()?;
        let paddings = match root.get("param_alignment_paddings") {
            None => vec![0; shapes.len()],
            Some(groups) => {
                let groups = groups.list()?;
                let group = groups.get(group).ok_or_else(|| root.refuse("with all paddings"))?;
                let paddings = group.list()?;
                if paddings.len() != shapes.len() {
                    return Err(group.refuse(format!("a list of {}", shapes.len())));
                }
                paddings.iter().map(PickleValue::size).collect::<Result<_, _>>()?
            }
        };
        let (mut starts, mut end) = (vec![], 0_usize);
        for ((_, shape), padding) in shapes.iter().zip(paddings) {
            starts.push(end);
            let numel = shape.iter().product::<usize>();
            // The paddings are not trusted. A sum beyond memory differs from the lengths of all
            // arrays.
            end = end.saturating_add(numel).saturating_add(padding);
        }
        Ok(Self { starts, end })
    }
}

/// The used and total number of elements in a rank's part of a group.
struct RankPartition {
    /// The number of elements for which masters are stored.
    used: usize,
    /// The number of elements including padding, which is the same on all ranks.
    whole: usize,
}

impl RankPartition {
    /// Returns the size of a rank's part and checks the lengths of its arrays.
    ///
    /// # Errors
    /// Returns an error for a padding that is larger than the part, or an array whose length is
    /// neither the used nor the total number of elements.
    fn new(rank: &OptimStatesFile, group: usize) -> Result<Self, DeepSpeedError> {
        let root = rank.root()?;
        let paddings = root.need("group_paddings")?;
        let list = paddings.list()?;
        let Some(padding) = list.get(group) else {
            return Err(paddings.refuse("a list with one padding a group"));
        };
        let RankGroup { weights, state } = &rank.groups[group];
        let (found, size) = (weights.numel(), padding.size()?);
        // The optimizer for bf16 with f32 gradients, which does not store its stage, pads the
        // masters too.
        let used = if rank.stage.is_some() { Some(found) } else { found.checked_sub(size) };
        let Some(used) = used else {
            return Err(padding.refuse(format!("at most the {found} elements of the partition")));
        };
        let whole = used.saturating_add(size);
        for (name, tensor) in &state.moments {
            let lengths = [used, whole];
            if tensor.shape.len() != 1 || !lengths.contains(&tensor.numel()) {
                let reason = format!(
                    "{name} of flat group {group} has shape {:?}, and has to have as many elements \
                     as the masters, {used}, with padding {whole}",
                    tensor.shape
                );
                return Err(DeepSpeedError::mixed(rank.path(), reason));
            }
        }
        Ok(Self { used, whole })
    }
}

/// Returns the frozen parameters. The file lists them at stage 2. At stage 1 they are the
/// parameters of the model that are not in a flat group.
///
/// # Errors
/// Returns an error if a listed parameter has no fragment.
fn frozen(model: &ModelStatesFile, trained: &[Stored]) -> Result<Vec<Stored>, DeepSpeedError> {
    if let Some(frozen) = &model.frozen {
        let frozen = frozen.iter().map(|named| {
            let weights = Segments::whole(model.fragment(&named.0)?);
            Ok(Stored::new(named.clone(), false, weights))
        });
        return frozen.collect();
    }
    let tied: Vec<_> = model.tied.iter().flatten().map(|(alias, _)| alias).collect();
    // Tied names refer to parameters that are listed, so they are not frozen ones.
    let known: std::collections::HashSet<_> =
        trained.iter().map(|stored| &stored.parameter.name).chain(tied).collect();
    let module = model.module()?.into_iter();
    let frozen = module.filter(|(name, _)| !known.contains(name));
    let frozen = frozen.map(|(name, tensor)| {
        Stored::new((name, tensor.shape.clone()), false, Segments::whole(tensor))
    });
    Ok(frozen.collect())
}
