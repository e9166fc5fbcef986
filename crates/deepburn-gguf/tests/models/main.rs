//! How llama.cpp describes models: writing and reading of hyperparameters, names and layouts.

mod model_file;
mod read;
mod written;
