use halcyon::Tensor;
use std::ops::{Add, Div, Mul, Sub};

/// A number of an optimizer's step: on the host in f64, or on the device in f32. The number is on the device
/// if the count of steps depends on computed values (see [`crate::LossScaler`]). With this type an
/// [`super::UpdateRule`] writes its formulas only once.
#[derive(Clone, Debug)]
pub enum Num {
    Host(f64),
    Device(Tensor),
}

impl From<f64> for Num {
    fn from(x: f64) -> Num {
        Num::Host(x)
    }
}

macro_rules! operators {
    ($($op:ident $name:ident $sign:tt;)*) => {
        $(
            impl $op for Num {
                type Output = Num;
                #[track_caller]
                fn $name(self, o: Num) -> Num {
                    match (self, o) {
                        (Num::Host(a), Num::Host(b)) => Num::Host(a $sign b),
                        (Num::Device(a), Num::Host(b)) => Num::Device(a $sign b),
                        (Num::Host(a), Num::Device(b)) => Num::Device(a $sign b),
                        (Num::Device(a), Num::Device(b)) => Num::Device(a $sign b),
                    }
                }
            }
            impl $op<f64> for Num {
                type Output = Num;
                #[track_caller]
                fn $name(self, o: f64) -> Num {
                    self $sign Num::Host(o)
                }
            }
            impl $op<Num> for f64 {
                type Output = Num;
                #[track_caller]
                fn $name(self, o: Num) -> Num {
                    Num::Host(self) $sign o
                }
            }
        )*
    };
}
operators! {
    Add add +;
    Sub sub -;
    Mul mul *;
    Div div /;
}

impl Num {
    fn map(self, host: impl Fn(f64) -> f64, device: impl Fn(&Tensor) -> Tensor) -> Num {
        match self {
            Num::Host(x) => Num::Host(host(x)),
            Num::Device(x) => Num::Device(device(&x)),
        }
    }

    #[track_caller]
    pub fn sqrt(self) -> Num {
        self.map(f64::sqrt, Tensor::sqrt)
    }

    /// The smaller of this number and `x`.
    #[track_caller]
    pub fn min(self, x: f64) -> Num {
        self.map(|a| a.min(x), |a| a.minimum(x))
    }

    /// This number to the power of `x`.
    #[track_caller]
    pub fn pow(self, x: f64) -> Num {
        self.map(|a| a.powf(x), |a| a.pow(x))
    }

    /// `1 - base^this`, for a base in `0..1`. The result is computed with `expm1`, because the difference of
    /// two numbers near 1 would lose digits.
    #[track_caller]
    pub fn one_minus_power_of(self, base: f64) -> Num {
        match base <= 0.0 {
            true => Num::Host(1.0),
            false => self.map(|t| -(t * base.ln()).exp_m1(), |t| -(t * base.ln()).expm1()),
        }
    }

    /// 1 if this number, the number of the step, is 1; otherwise `x`.
    #[track_caller]
    pub fn one_if_first(self, x: f64) -> Num {
        self.map(
            |t| if t < 1.5 { 1.0 } else { x },
            |t| {
                let one = Tensor::ones(t.backend(), [0usize; 0], halcyon::ir::DType::F32);
                t.lt(1.5).select(&one, &(&one * x))
            },
        )
    }
}
