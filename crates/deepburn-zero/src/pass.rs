//! The passes of a sharded model.

/// The kind of a pass; each has its own record of uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Forward and backward.
    Train,
    /// Forward only.
    Evaluate,
    /// Reading parameters to save them.
    Save,
}
