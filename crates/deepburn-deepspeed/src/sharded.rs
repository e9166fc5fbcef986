//! Stage 3: each parameter is partitioned over the ranks.
//!
//! With W ranks, each rank stores a chunk of ceil(n / W) elements of a parameter of n elements. The
//! last chunks are padded with uninitialized memory, which is never read. The concatenation of a
//! rank's flat groups is the concatenation of its chunks of all parameters. Frozen parameters are
//! in the model files, one chunk per rank.
//!
//! ```text
//! parameter, 10 elements, 3 ranks:   0 1 2 3 | 4 5 6 7 | 8 9 x x
//! rank 1's flat groups:              … | 4 5 6 7 | its 1/3 of the next parameter | …
//! ```
//!
//! The groups in the file need not be DeepSpeed's parameter groups: DeepSpeed divides large groups
//! into sub-groups, whose concatenation is the same.

use crate::DeepSpeedError;
use crate::model_states_file::{ModelStatesFile, Named};
use crate::optim_states_file::OptimStatesFile;
use crate::partitioned::moment_names;
use crate::stored::{SavedState, Stored};
use crate::tensor::Segments;

//= deepspeed 0.19.8 utils/zero_to_fp32.py _zero3_merge_trainable_params
/// Assembles the parameters of a checkpoint. `models` and `ranks` have the files of all ranks in
/// order; neither is empty.
///
/// # Errors
/// Returns [`DeepSpeedError::Mixed`] if the files differ in a way in which files of one save do
/// not, or [`DeepSpeedError::Unsupported`] without frozen parameters.
pub(crate) fn assemble(
    models: &[ModelStatesFile],
    ranks: &[OptimStatesFile],
) -> Result<SavedState, DeepSpeedError> {
    let (model, first) = (&models[0], &ranks[0]);
    for other in models {
        other.refuse_excluded()?;
        check_alike(model, other)?;
    }
    for rank in ranks {
        rank.check(first, ranks.len())?;
    }
    let moments = moment_names(first)?;
    let mut stored = trained(model, ranks)?;
    for named in model.frozen.iter().flatten() {
        stored.push(frozen(models, named)?);
    }
    Ok(SavedState { stage: 3, stored, moments, steps: first.steps(), loss_scale: first.loss_scale })
}

/// Checks that two ranks' model files agree.
///
/// # Errors
/// Returns [`DeepSpeedError::Mixed`] if counters, groups or frozen parameters differ.
fn check_alike(model: &ModelStatesFile, other: &ModelStatesFile) -> Result<(), DeepSpeedError> {
    let alike = model.summary == other.summary
        && (&model.groups, &model.frozen) == (&other.groups, &other.frozen);
    if alike {
        return Ok(());
    }
    let reason = format!(
        "its counters or parameters differ from {} ({:?}, not {:?})",
        model.path().display(),
        other.summary,
        model.summary
    );
    Err(DeepSpeedError::mixed(other.path(), reason))
}

/// Assembles the trained parameters. Files of stage 3 do not contain the working copies, so the
/// masters cannot be checked against them.
///
/// # Errors
/// Returns [`DeepSpeedError::Mixed`] if a rank has another number of elements than the shapes
/// require.
fn trained(
    model: &ModelStatesFile,
    ranks: &[OptimStatesFile],
) -> Result<Vec<Stored>, DeepSpeedError> {
    let shapes: Vec<_> = model.groups.iter().flatten().flatten().collect();
    let chunk = |named: &Named| named.1.iter().product::<usize>().div_ceil(ranks.len());
    let sum: usize = shapes.iter().map(|named| chunk(named)).sum();
    let joined: Vec<_> = ranks.iter().map(|rank| join(rank, sum)).collect::<Result<_, _>>()?;
    let mut start = 0;
    let stored = shapes.into_iter().map(|named| {
        let (numel, chunk) = (named.1.iter().product::<usize>(), chunk(named));
        let gather = |array: usize| {
            let mut segments = Segments::default();
            for (rank, arrays) in joined.iter().enumerate() {
                // The last ranks have fewer elements or none; the rest of their chunk is padding.
                let len = chunk.min(numel.saturating_sub(rank * chunk));
                segments.append(arrays[array].cut(start..start + len));
            }
            segments
        };
        let mut stored = Stored::new(named.clone(), true, gather(0));
        stored.moments = (1..joined[0].len()).map(gather).collect();
        start += chunk;
        stored
    });
    Ok(stored.collect())
}

/// Concatenates a rank's flat groups. Returns the masters and then every array of the optimizer,
/// each with `expected` elements.
fn join(rank: &OptimStatesFile, expected: usize) -> Result<Vec<Segments>, DeepSpeedError> {
    let moments = rank.groups.first().map_or(0, |group| group.state.moments.len());
    let mut joined: Vec<_> = (0..=moments).map(|_| Segments::default()).collect();
    for (number, group) in rank.groups.iter().enumerate() {
        let len = group.weights.numel();
        joined[0].add(group.weights.clone(), len);
        for (joined, (name, tensor)) in joined[1..].iter_mut().zip(&group.state.moments) {
            if tensor.shape != [len] {
                let reason = format!(
                    "{name} of flat group {number} has shape {:?}, and has to have as many \
                     elements as the masters, {len}",
                    tensor.shape
                );
                return Err(DeepSpeedError::mixed(rank.path(), reason));
            }
            joined.add(tensor.clone(), len);
        }
    }
    if joined[0].len() != expected {
        let found = joined[0].len();
        let reason =
            format!("its flat groups have {found} elements, but the parameters have {expected}");
        return Err(DeepSpeedError::mixed(rank.path(), reason));
    }
    Ok(joined)
}

/// Assembles a frozen parameter from its chunks in all model files.
///
/// # Errors
/// Returns [`DeepSpeedError::Mixed`] if the length of a chunk does not match the shape.
fn frozen(models: &[ModelStatesFile], named: &Named) -> Result<Stored, DeepSpeedError> {
    let numel: usize = named.1.iter().product();
    let chunk = numel.div_ceil(models.len());
    let mut segments = Segments::default();
    for (rank, model) in models.iter().enumerate() {
        let tensor = model.fragment(&named.0)?;
        if tensor.numel() != chunk {
            let reason = format!(
                "frozen {} has {} elements here, where its shape {:?} over {} ranks comes to {chunk}",
                named.0,
                tensor.numel(),
                named.1,
                models.len()
            );
            return Err(DeepSpeedError::mixed(model.path(), reason));
        }
        let len = chunk.min(numel.saturating_sub(rank * chunk));
        segments.append(Segments::whole(tensor).cut(0..len));
    }
    Ok(Stored::new(named.clone(), false, segments))
}
