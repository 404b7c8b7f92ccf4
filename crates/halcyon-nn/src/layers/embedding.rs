use super::{invalid, located};
use crate::init::Init;
use crate::module::{Module, Visit};
use crate::slot::Param;
use halcyon::ir::DType;
use halcyon::ir::error::Result;
use halcyon::{Backend, Tensor};

/// Options of [`Embedding::with`].
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingOptions {
    /// A row that starts as zeros and has no gradient. Default: none.
    pub padding_index: Option<usize>,
    pub dtype: DType,
    /// Initial values. Default: standard normal.
    pub weight: Init,
}

impl Default for EmbeddingOptions {
    fn default() -> EmbeddingOptions {
        let weight = Init::Normal { mean: 0.0, std: 1.0 };
        EmbeddingOptions { padding_index: None, dtype: DType::F32, weight }
    }
}

/// Looks up rows of a table by index: maps integers `[…]` to `[…, size]`. `weight` is `[count, size]`.
#[derive(Clone, Debug)]
pub struct Embedding {
    pub weight: Param,
    padding_index: Option<usize>,
}

impl Module for Embedding {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.child("weight", &self.weight);
    }
    fn kind(&self) -> &'static str {
        "Embedding"
    }
}

impl Embedding {
    /// A table of `count` rows of `size` elements.
    ///
    /// # Errors
    /// `Error::Argument` if a size is 0; errors of the device.
    pub fn new(backend: &Backend, count: usize, size: usize) -> Result<Embedding> {
        Embedding::with(backend, count, size, EmbeddingOptions::default())
    }

    /// A table with options.
    ///
    /// # Errors
    /// Those of [`Embedding::new`], and `Error::Argument` for a padding index beyond the table.
    pub fn with(backend: &Backend, count: usize, size: usize, o: EmbeddingOptions) -> Result<Embedding> {
        if count == 0 || size == 0 {
            return Err(invalid(
                "Embedding",
                format!("{count} rows of {size} elements; both must be at least 1"),
            ));
        }
        let mut weight = o.weight.tensor(backend, &[count, size], o.dtype)?;
        if let Some(p) = o.padding_index {
            if p >= count {
                return Err(invalid(
                    "Embedding",
                    format!("the padding index {p} is beyond the {count} rows"),
                ));
            }
            let keep = row_numbers(&weight, count).ne(p as i64).cast(o.dtype);
            weight = weight * keep;
        }
        Ok(Embedding { weight: Param::new(weight), padding_index: o.padding_index })
    }

    /// The rows of `index`, integers of any shape. An index outside of the table causes an error when a
    /// result is read.
    #[track_caller]
    pub fn forward(&self, index: &Tensor) -> Tensor {
        let weight = self.weight.value();
        let table = match (self.padding_index, weight.dims()) {
            (Some(p), Ok(dims)) => {
                let is_padding = row_numbers(&weight, dims[0]).eq(p as i64);
                is_padding.select(&weight.stop_gradient(), &weight)
            }
            _ => weight,
        };
        located(table.gather(index, 0), &self.weight, index)
    }
}

/// The row numbers of a table, i32 `[count, 1]`.
fn row_numbers(table: &Tensor, count: usize) -> Tensor {
    Tensor::arange(table.backend(), count, DType::I32).unsqueeze(1)
}
