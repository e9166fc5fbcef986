//! The backends on which sharded modules train and are evaluated.

use burn_autodiff::Autodiff;

use crate::decorator::{Autocast, Staged};

/// The autodiff backend on which sharded modules train.
pub type Training<B> = Autocast<Autodiff<Staged<B>>>;

/// The backend on which sharded modules are evaluated, which is [`Training`] without autodiff.
pub type Zero<B> = Autocast<Staged<B>>;
