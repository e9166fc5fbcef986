//! The passes of a sharded model.

/// The kind of a pass. The order of parameter uses is recorded separately for each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Forward and backward.
    Train,
    /// Forward only.
    Evaluate,
    /// Reading parameters in order to save them.
    Save,
}
