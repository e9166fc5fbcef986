//! Random numbers of one rank.
//!
//! Backends draw from one generator per device, which the threads of several ranks would share:
//! what a rank draws would depend on who came first. Each rank therefore has a stream of its own,
//! keyed by the seed and the rank, whose position is a number that can be saved. It is the same
//! at every ZeRO stage, because it depends on the sequence of draws alone.

use burn_backend::{Distribution, Element, Shape, TensorData};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// The random stream of one rank.
#[derive(Debug, Clone)]
pub struct RandomStream {
    seed: u64,
    model: u32,
    rank: usize,
    generator: ChaCha8Rng,
}

impl RandomStream {
    /// The stream of `rank` in a job with this `seed`, for the model with the number `model` among
    /// those of a rank, from 0: two models draw different masks from one seed.
    pub fn new(seed: u64, model: u32, rank: usize) -> Self {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        generator.set_stream(u64::from(model) << 32 | (rank as u64 + 1));
        Self { seed, model, rank, generator }
    }

    /// Starts the stream anew from another seed.
    pub fn reseed(&mut self, seed: u64) {
        *self = Self::new(seed, self.model, self.rank);
    }

    /// The number of the model that draws from it.
    pub fn model(&self) -> u32 {
        self.model
    }

    /// The seed that it was made of.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Words drawn so far.
    pub fn position(&self) -> u128 {
        self.generator.get_word_pos()
    }

    /// Continues after `position` words.
    pub fn seek(&mut self, position: u128) {
        self.generator.set_word_pos(position);
    }

    /// Draws an array of `shape`.
    pub(crate) fn draw<E: Element>(
        &mut self,
        shape: Shape,
        distribution: Distribution,
    ) -> TensorData {
        TensorData::random::<E, _, _>(shape, distribution, &mut self.generator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(stream: &mut RandomStream) -> Vec<f32> {
        let data = stream.draw::<f32>(Shape::from(vec![5]), Distribution::Default);
        data.to_vec().unwrap()
    }

    #[test]
    fn ranks_and_models_differ_and_positions_resume() {
        let mut stream = RandomStream::new(7, 0, 0);
        let first = draw(&mut stream);
        assert_ne!(first, draw(&mut RandomStream::new(7, 0, 1)));
        assert_ne!(first, draw(&mut RandomStream::new(8, 0, 0)));
        assert_ne!(first, draw(&mut RandomStream::new(7, 1, 0)));
        assert_eq!(first, draw(&mut RandomStream::new(7, 0, 0)));

        let position = stream.position();
        let second = draw(&mut stream);
        let mut resumed = RandomStream::new(7, 0, 0);
        resumed.seek(position);
        assert_eq!(second, draw(&mut resumed));
    }
}
