use halcyon::optable;

/// Random numbers. The seed of [`Rng::fresh`] is printed, so that a failure can be repeated.
#[derive(Debug)]
pub struct Rng(optable::Rng);

impl Rng {
    pub fn fresh(test: &str) -> Rng {
        Rng::new(crate::seed(test))
    }

    pub fn new(seed: u64) -> Rng {
        Rng(optable::Rng::new(seed))
    }
}

impl std::ops::Deref for Rng {
    type Target = optable::Rng;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl std::ops::DerefMut for Rng {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}
