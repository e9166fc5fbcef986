//! The rules of DeepSpeed's sections: each turns a section into its part of the plan.
//!
//! A rule that reports an error still returns a value; the verdict discards it together with the
//! rest of the plan. Sections are checked in full also where they are switched off.
//!
//! What most rules use is imported here, so that a rule imports this module and the keys of its
//! section.

pub(crate) mod activations;
mod autocast;
pub(crate) mod batch;
pub(crate) mod curriculum;
pub(crate) mod data_efficiency;
mod hyperparameters;
pub(crate) mod monitor;
mod muon;
pub(crate) mod offload;
pub(crate) mod one_bit;
pub(crate) mod optimizer;
pub(crate) mod precision;
pub(crate) mod reduction;
pub(crate) mod scheduler;
mod variant;
pub(crate) mod zero;

use hyperparameters::{bounds, learning_rate, moments};
use variant::choose;

use crate::context::Context;
use crate::diagnosis::{Severity, note, refuse, report, warning};
use crate::key::{Status, Trigger, Variant};
use crate::node::Node;
use crate::plan::*;
use crate::section::{Entry, Read, Section, Setting, filled};
