//! Describes, compares and reads buffers in checkpoints.
//!
//! A buffer is an entry of kind `Buffer`, which has only values, in the buffer's own element type.
//! Each rank writes the elements that it would own of a parameter. Checkpoints of early versions
//! lack such entries. They still load, with a warning for each value that they cannot restore.

use burn::tensor::TensorData;
use deepburn_checkpoint::{
    Checkpoint, CheckpointError, ElementType, EntryKind, ParamEntry, StateKind, StoredState,
};
use deepburn_zero::{Buffer, BufferKind};

use super::element::{data_of, element_type};
use super::{TrainingCheckpointError, entry_of};

/// Returns the checkpoint entry of a buffer.
///
/// # Errors
/// Returns an error if the element type of the buffer is not supported in checkpoints.
pub(super) fn buffer_entry(buffer: &Buffer) -> Result<ParamEntry, CheckpointError> {
    let element = element_type(buffer.dtype())?;
    Ok(ParamEntry {
        path: buffer.path().to_owned(),
        shape: buffer.shape().to_vec(),
        kind: EntryKind::Buffer,
        trainable: false,
        aliases: buffer.aliases().to_vec(),
        states: vec![StoredState { kind: StateKind::Weights, element }],
        base: None,
        // All stages of a pipeline have the buffers.
        pipeline_stage: 0,
    })
}

/// Checks that the checkpoint has this buffer with the same shape and element type.
///
/// Checkpoints of early versions stored running statistics as frozen parameters, and did not store
/// integer and bool parameters. Both are accepted.
///
/// # Errors
/// Returns the difference, as the reason in an error message.
pub(super) fn check_buffer(checkpoint: &Checkpoint, buffer: &Buffer) -> Result<(), String> {
    let path = buffer.path();
    let Some(entry) = entry_of(checkpoint, path) else {
        // Versions that store buffers have an entry of kind `Buffer` for each, so a checkpoint
        // without any is taken for an older one.
        let old =
            checkpoint.layout().entries().iter().all(|entry| entry.kind == EntryKind::Parameter);
        let constant = buffer.kind() != BufferKind::RunningStatistic;
        if old && constant {
            return Ok(());
        }
        return Err(format!("it has no buffer {path}, but this model has one"));
    };
    if entry.shape[..] != buffer.shape()[..] {
        let (shape, own) = (&entry.shape, buffer.shape().to_vec());
        return Err(format!("its buffer {path} has shape {shape:?}, but this model's has {own:?}"));
    }
    let own = element_type(buffer.dtype()).map_err(|error| error.to_string())?;
    let stored = entry.element_of(&StateKind::Weights);
    let fits = match entry.kind {
        EntryKind::Buffer => stored == Some(own),
        EntryKind::Parameter => {
            stored.is_some() && !entry.trainable && buffer.kind() == BufferKind::RunningStatistic
        }
    };
    if !fits {
        let stored = stored.map_or("nothing", ElementType::name);
        return Err(format!(
            "its {path} is stored as {stored} and this model's buffer is {own}: build the model with \
             that type"
        ));
    }
    Ok(())
}

/// Reads the values of a buffer; `None` if the checkpoint does not have it.
///
/// The result has all elements, flat, in the stored type. Every rank reads complete buffers.
///
/// # Errors
/// Returns an error if the checkpoint cannot be read.
pub(super) fn read_buffer(
    checkpoint: &Checkpoint,
    buffer: &Buffer,
) -> Result<Option<TensorData>, TrainingCheckpointError> {
    if entry_of(checkpoint, buffer.path()).is_none() {
        return Ok(None);
    }
    let values = checkpoint.read(buffer.path(), &StateKind::Weights, 0..buffer.numel())?;
    Ok(Some(data_of(values)))
}

/// Logs which values a checkpoint of an early version cannot restore.
pub(super) fn warn_of_missing(checkpoint: &Checkpoint, buffers: &[Buffer]) {
    let folder = checkpoint.path().display();
    for path in buffers.iter().map(Buffer::path) {
        match entry_of(checkpoint, path).map(|entry| entry.kind) {
            Some(EntryKind::Buffer) => {}
            Some(EntryKind::Parameter) => tracing::warn!(
                "{folder}: running statistic {path} was saved before buffers were stored and has \
                 the values that training began with; train on before you evaluate"
            ),
            None => tracing::warn!(
                "{folder}: {path} was not saved, because buffers were not stored then; it keeps the \
                 values that it has"
            ),
        }
    }
}
