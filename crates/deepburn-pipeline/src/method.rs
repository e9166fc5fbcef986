//! The methods that cut a model into stages.

use regex::Regex;

/// How blocks are divided into stages.
#[derive(Debug, Clone)]
pub enum CutMethod {
    /// The fastest pipeline whose stages fit into memory.
    Cost,
    /// Similar numbers of parameters, with DeepSpeed's algorithm.
    Parameters,
    /// Equal numbers of blocks, as in DeepSpeed.
    Uniform,
    /// Similar numbers of the blocks whose names match, with DeepSpeed's algorithm.
    Type(Regex),
}
