//! Curriculum learning: the sequence length at each step (Li et al. 2022).

use serde::Serialize;

/// A sequence length that increases during training. Longer sequences are truncated.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CurriculumPlan {
    /// Shortest length, in tokens, at least 1.
    pub min_difficulty: usize,
    /// Longest length, in tokens.
    pub max_difficulty: usize,
    /// How the length increases from the minimum to the maximum.
    pub schedule: CurriculumSchedule,
}

/// The schedule of a curriculum.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum CurriculumSchedule {
    /// In stages.
    Discrete {
        /// All stages except the last, in order.
        stages: Vec<CurriculumStage>,
        /// Length in the last stage.
        last: usize,
    },
    /// Along `(t / T)^(1 / r)`.
    Root {
        /// Steps until the longest length, `T`.
        total_steps: usize,
        /// Lengths are multiples of this number, except the longest one.
        difficulty_step: usize,
        /// Degree of the root, `r`; 1 is a line.
        root_degree: f64,
    },
}

/// A stage of a curriculum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CurriculumStage {
    /// Length of sequences, in tokens.
    pub difficulty: usize,
    /// Last step of this length.
    pub last_step: usize,
}
