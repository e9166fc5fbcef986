# Commands for contributors; `just` alone lists them. https://just.systems

default:
    @just --list

# Train the main job: GPT-2 small on a synthetic corpus, two ranks
train *arguments:
    cargo run --release --bin finetune -- --config gpt2.json {{ arguments }}

# Check types everywhere, without code generation
check:
    cargo check --release --workspace --all-targets

# Format, then lint with warnings as errors
lint:
    cargo fmt --all
    cargo clippy --release --workspace --all-targets -- -D warnings

# Run the tests, or those that match, e.g. `just test --test states parity`
test *arguments:
    cargo test --release --workspace {{ arguments }}

# Run an example: mlp, images, gan, training_loop or classifier
example name *arguments:
    cargo run --release --example {{ name }} -- {{ arguments }}

# Build the API documentation with warnings as errors
doc:
    RUSTDOCFLAGS='-D warnings' cargo doc --release --workspace --no-deps

# Feed mutated files to every reader, `inputs` for each
fuzz inputs='100000':
    DEEPBURN_FUZZ_INPUTS={{ inputs }} cargo test --release --workspace --test fuzz -- --nocapture

# Kill and restart training jobs, `rounds` times
soak rounds='100':
    DEEPBURN_SOAK={{ rounds }} cargo test --release --workspace --test programs -- --ignored soak_of_many_kills

# Measure, e.g. `just bench step products --peers ../peers`
bench *arguments:
    cargo run --release -p deepburn-benches -- {{ arguments }}

# Check what `cargo publish` would upload
publish:
    cargo publish --workspace --dry-run --no-verify --locked

# Everything that has to hold before a change goes in
ci:
    .ci/run
