//! Kernels of vendor libraries: products by cuBLASLt, hipBLASLt and rocBLAS, convolutions and attention by
//! cuDNN.
//!
//! The libraries are optional and loaded by the first call that needs one. A call that they do not support,
//! or that a generated kernel does better, is declined with the reason. All resources of a run are determined
//! when the kernel is created: a run neither allocates device memory nor waits for the device.

mod attention;
mod blas_lt;
mod cudnn;
mod cudnn_graph;
mod epilogue;
mod product;
mod rocblas;
mod search;
mod tensile;

use super::memory::SimtBuffer;
use super::sys::{Address, Code, Context, Handle, Side, by_major};
use super::{Family, VendorLibrary};
use crate::library_call::{Bound, CallForm, Needs};
use crate::{Declined, Error, LibraryCall, LibraryKernel, Options, Result, reach};
use attention::Attention;
use blas_lt::Lt;
use cudnn::Dnn;
use halcyon_ir::DType;
use halcyon_ir::composite::CompositeKind;
use halcyon_ir::ops::Op;
use halcyon_ir::target::{MatmulPrecision, Work};
use product::Product;
use rocblas::RocBlas;
pub(super) use search::{Search, Searcher};
use smallvec::SmallVec;
use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Maximum workspace of one call, in bytes.
const WORKSPACE: usize = 32 << 20;
/// Maximum number of algorithms that a library is asked for.
const MAX_ALGORITHMS: usize = 8;
/// Alignment of workspaces.
const WORKSPACE_ALIGNMENT: usize = 256;

/// Declares a table of functions that only one vendor has.
macro_rules! functions_of_one {
    ($(#[$doc:meta])* $table:ident { $($field:ident: $name:literal, ($($argument:ty),*);)* }) => {
        crate::simt::sys::functions! {
            $(#[$doc])*
            $table { $($field: $name, $name, ($($argument),*);)* }
        }
    };
}
use functions_of_one;

/// Where to search for the libraries.
#[derive(Clone, Debug)]
pub(super) enum Sources {
    /// The loader's path, the toolkit's directories and Python packages.
    System,
    /// One library with the functions of all vendor libraries.
    Named(String),
    /// Use no libraries.
    None,
}

/// Why a library is not used.
type Absent = String;

/// The vendor's libraries for one device.
#[derive(Debug)]
pub(super) struct Libraries {
    context: Arc<Context>,
    /// The device's id, stored in its kernels.
    owner: u64,
    sources: Sources,
    /// Whether cuDNN may be used.
    dnn: bool,
    /// Whether matrix units may be used.
    matrix: bool,
    products: OnceLock<Result<Arc<Lt>, Absent>>,
    plain: OnceLock<Result<Arc<RocBlas>, Absent>>,
    convolutions: OnceLock<Result<Arc<Dnn>, Absent>>,
}

impl Libraries {
    pub(super) fn new(context: &Arc<Context>, owner: u64, sources: Sources, options: &Options) -> Libraries {
        Libraries {
            context: context.clone(),
            owner,
            sources,
            dnn: options.cudnn != Some(false),
            matrix: options.matrix_units != Some(false),
            products: OnceLock::new(),
            plain: OnceLock::new(),
            convolutions: OnceLock::new(),
        }
    }

    fn family(&self) -> &'static Family {
        self.context.api.family
    }

    /// The names of `l` to try: the vendor's names, the library that the user named instead, or the library
    /// of [`super::SimtDriver::with_kernels`].
    fn candidates(&self, l: &VendorLibrary) -> Vec<String> {
        match &self.sources {
            Sources::System => self.family().library_candidates(l),
            Sources::Named(path) => vec![path.clone()],
            Sources::None => vec![],
        }
    }

    /// Returns a library, loading it once.
    fn get<T>(
        &self,
        cell: &OnceLock<Result<Arc<T>, Absent>>,
        library: Option<&'static VendorLibrary>,
        open: impl Fn(&Arc<Context>, &'static VendorLibrary, &[String]) -> Result<T>,
    ) -> Result<Arc<T>, Absent> {
        let Some(library) = library else {
            return Err(format!("{} has no library for this work", self.family().title));
        };
        cell.get_or_init(|| {
            let mut names = self.candidates(library);
            if names.is_empty() {
                return Err(format!(
                    "{} is not used: this driver was opened without a library of kernels",
                    library.title
                ));
            }
            if library.with_driver
                && let Some(major) = self.context.api.major()
            {
                names = by_major(names, major);
            }
            // If a library does not work with the driver or the device, the next one is tried.
            let (mut absent, mut passed) = (vec![], vec![]);
            for name in &names {
                let opened = self.context.enter();
                match opened.and_then(|()| open(&self.context, library, std::slice::from_ref(name))) {
                    Ok(opened) => {
                        if !passed.is_empty() {
                            let why = passed.join("; ");
                            tracing::warn!(
                                device = self.context.id,
                                used = name,
                                "libraries were skipped: {why}"
                            );
                        }
                        return Ok(Arc::new(opened));
                    }
                    // Here the error means that the library is missing; the backend exists.
                    Err(Error::Unavailable { tried, .. }) => absent.extend(tried),
                    Err(e) => passed.push(format!("{name}: {e}")),
                }
            }
            let reason = match passed.is_empty() {
                true => {
                    let title = library.title;
                    format!("no {title} could be loaded ({}). {}", absent.join("; "), library.fix)
                }
                false => passed.join("; "),
            };
            tracing::info!(device = self.context.id, library = library.title, "not used: {reason}");
            Err(reason)
        })
        .clone()
    }

    fn products(&self) -> Result<Arc<Lt>, Absent> {
        self.get(&self.products, Some(&self.family().products), |c, l, names| {
            // SAFETY: `get` passes the names that `candidates` returns. They are names of the vendor's
            // library, one that the user set in its place, or the one of `with_kernels`, which requires that
            // loading it is sound.
            unsafe { Lt::open(c, l, names) }
        })
    }

    fn plain_products(&self) -> Result<Arc<RocBlas>, Absent> {
        self.get(&self.plain, self.family().plain_products.as_ref(), |c, l, names| {
            // SAFETY: `get` passes the names that `candidates` returns. They are names of the vendor's
            // library, one that the user set in its place, or the one of `with_kernels`, which requires that
            // loading it is sound.
            unsafe { RocBlas::open(c, l, names) }
        })
    }

    /// The name and the version of cuDNN's library, and whether it has attention. Loads the library.
    pub(super) fn dnn(&self) -> Result<String, Absent> {
        self.convolutions().map(|d| d.describe())
    }

    fn convolutions(&self) -> Result<Arc<Dnn>, Absent> {
        if !self.dnn {
            return Err("it is switched off".into());
        }
        // cuDNN loads cuBLASLt by its name only. If cuBLASLt is already loaded, cuDNN finds it even if it is
        // in a directory that the loader does not search.
        let _ = self.products();
        self.get(&self.convolutions, self.family().convolutions.as_ref(), |c, l, names| {
            // SAFETY: `get` passes the names that `candidates` returns. They are names of the vendor's
            // library, one that the user set in its place, or the one of `with_kernels`, which requires that
            // loading it is sound.
            unsafe { Dnn::open(c, l, names) }
        })
    }

    /// Whether the library of products is found, whose kernels apply epilogues. Loads the library.
    pub(super) fn has_epilogues(&self) -> bool {
        self.products().is_ok()
    }

    /// Each library with its version, or why it is not used. Loads the libraries.
    pub(super) fn describe(&self) -> Vec<(String, String)> {
        let f = self.family();
        let mut all =
            vec![(f.products.title, self.products().map_or_else(|absent| absent, |l| l.describe()))];
        if let Some(l) = &f.plain_products {
            all.push((l.title, self.plain_products().map_or_else(|absent| absent, |l| l.describe())));
        }
        if let Some(l) = &f.convolutions {
            all.push((l.title, self.convolutions().map_or_else(|absent| absent, |l| l.describe())));
        }
        all.into_iter().map(|(name, text)| (name.to_string(), text)).collect()
    }

    /// Whether a library is found whose algorithms can be searched. Loads the libraries.
    pub(super) fn lists_algorithms(&self) -> Result<(), Absent> {
        match (self.products(), self.convolutions()) {
            (Err(products), Err(convolutions)) => {
                Err(format!("no library that lists algorithms is found: {products}; {convolutions}"))
            }
            _ => Ok(()),
        }
    }

    /// A kernel for the call, or why there is none. With a searcher, the algorithms that the library lists
    /// are measured.
    pub(super) fn find(
        &self,
        call: &LibraryCall<'_>,
        searcher: Option<Searcher<'_>>,
    ) -> Result<SimtKernel, Declined> {
        // `false`: the vendor's kernels do not read packed constants.
        CallForm::first(call, false, |form| self.find_form(form, searcher))
    }

    fn find_form(&self, call: &CallForm<'_>, searcher: Option<Searcher<'_>>) -> Result<SimtKernel, Declined> {
        let Work::Op(op) = call.work else {
            return Err(Declined::because("fused chains use generated kernels"));
        };
        // After this check, no product of the sizes of one operand overflows.
        call.inputs.iter().chain(call.outputs).try_for_each(|o| reach::elements(o).map(drop))?;
        let bytes = product::of_bytes(call).is_some();
        let attention = match op {
            Op::Composite(c)
                if c.kind == CompositeKind::Attention && self.family().convolutions.is_some() =>
            {
                Some(c)
            }
            _ => None,
        };
        if !matches!(op, Op::Matmul | Op::Conv(_)) && !bytes && attention.is_none() {
            return Err(Declined::because(format!("the vendor's libraries are not used for {}", op.name())));
        }
        if call.in_place > 0 {
            return Err(Declined::because("the vendor's kernels do not run in place"));
        }
        call.one_dense_output()?;
        call.native_types()?;
        // On CUDA, the library multiplies f32 at the highest precision without matrix units. On ROCm, rocBLAS
        // uses matrix units for every type.
        let plain = self.family().side == Side::Cuda
            && call.precision == MatmulPrecision::Highest
            && call.inputs.iter().chain(call.outputs).all(|o| o.dtype == DType::F32);
        if !self.matrix && !plain {
            return Err(Declined::because(
                "matrix units are switched off, and the library may use them for this call",
            ));
        }
        call.unmasked()?;
        if let Some(c) = attention {
            let a = Attention::of(call, c)?;
            let dnn = self.convolutions().map_err(Declined::because)?;
            return dnn.attention(self.owner, call, &a);
        }
        match op {
            Op::Conv(c) => {
                let conv = cudnn::Conv::of(call, c)?;
                let dnn = self.convolutions().map_err(Declined::because)?;
                dnn.kernel(self.owner, call, conv, searcher)
            }
            _ => {
                // The target has reported to the passes that it multiplies 8-bit floats if both factors are
                // dense. So if such a product is declined, `dense` lists the factors that are not dense; the
                // passes copy these and query again. If both factors are dense and the call is still
                // declined, no other kernel computes the product.
                let spread = |d: Declined| match bytes && d.dense.is_empty() {
                    true => {
                        let dense = (0..2).filter(|&i| !call.inputs[i].view.is_dense()).collect();
                        Declined { dense, ..d }
                    }
                    false => d,
                };
                let p = Product::of(call).map_err(spread)?;
                let first = match self.products() {
                    Ok(lt) => match lt.kernel(self.owner, call, &p, searcher) {
                        Ok(k) => return Ok(k),
                        Err(d) => d,
                    },
                    Err(absent) => Declined::because(absent),
                };
                if self.family().plain_products.is_none() {
                    return Err(spread(first));
                }
                let second = match self.plain_products() {
                    Ok(b) => match b.kernel(self.owner, call, &p) {
                        Ok(k) => return Ok(k),
                        Err(d) => d.reason,
                    },
                    Err(absent) => absent,
                };
                let reason = format!("{}; {second}", first.reason);
                Err(spread(Declined { reason, ..first }))
            }
        }
    }
}

/// The library's plan or call that a kernel runs.
trait KernelCall: Send + Sync + fmt::Debug {
    /// Enqueues the work of one call in `stream`, on buffers at the addresses `at`.
    ///
    /// # Safety
    /// `stream` must be a live stream of the kernel's device. `at` must hold the addresses of buffers that
    /// passed [`SimtKernel::check`], in its order, which stay allocated until the work has run.
    unsafe fn enqueue(&self, stream: Handle, at: &[Address]) -> Result<()>;

    /// Makes the calls that are not permitted while the stream is being captured.
    ///
    /// # Safety
    /// `stream` must be a live stream of the kernel's device that nothing else uses during the call.
    unsafe fn prepare(&self, _stream: Handle) -> Result<()> {
        Ok(())
    }
}

/// A vendor library's kernel, created for one call.
#[derive(Debug)]
pub(super) struct SimtKernel {
    name: String,
    /// Id of the kernel's device.
    pub owner: u64,
    /// The requirements on the buffers: inputs, output, workspace.
    needs: Needs,
    applies_epilogue: bool,
    workspace: usize,
    /// Required alignment of the buffers.
    alignment: usize,
    body: Box<dyn KernelCall>,
}

impl SimtKernel {
    fn new(
        name: String,
        owner: u64,
        call: &CallForm<'_>,
        workspace: usize,
        body: impl KernelCall + 'static,
    ) -> Result<SimtKernel, Declined> {
        let mut needs = call.needs()?;
        needs.add_workspace(workspace);
        Ok(SimtKernel {
            name,
            owner,
            needs,
            applies_epilogue: call.epilogue.is_some(),
            workspace,
            alignment: WORKSPACE_ALIGNMENT,
            body: Box::new(body),
        })
    }

    /// The sizes in bytes of the buffers of a run, without the workspace.
    fn operands(&self) -> Vec<usize> {
        let n = self.needs.len() - usize::from(self.workspace > 0);
        (0..n).filter_map(|i| self.needs.get(i)).map(|n| n.bytes).collect()
    }

    /// Whether a run writes buffer `i`. A run only reads all other buffers.
    pub(super) fn writes(&self, i: usize) -> bool {
        self.needs.get(i).is_some_and(|n| n.write)
    }

    /// Validates the buffers of a run: everything that the kernel reads and writes lies inside of them, and
    /// what it writes does not overlap with other buffers.
    pub(super) fn check(&self, buffers: &[&SimtBuffer]) -> Result<()> {
        let bound = |i: usize| Bound {
            address: buffers[i].address(),
            bytes: crate::Buffer::bytes(buffers[i]),
            span: self.needs.get(i).map_or(0, |n| n.bytes),
        };
        self.needs.check(&self.name, buffers.len(), bound)?;
        let unaligned = |b: &&SimtBuffer| !b.address().is_multiple_of(self.alignment as u64);
        match buffers.iter().position(unaligned) {
            None => Ok(()),
            Some(i) => {
                let what = format!("buffer {i} does not begin at a multiple of {} bytes", self.alignment);
                Err(Error::argument(self.name.as_str(), what))
            }
        }
    }

    /// Prepares for a capture on a stream that is used for captures only. The caller calls this before the
    /// capture begins.
    ///
    /// # Safety
    /// `stream` must be a live stream of the kernel's device that nothing else uses during the call.
    pub(super) unsafe fn prepare(&self, stream: Handle) -> Result<()> {
        // SAFETY: `SimtKernel::prepare` requires a live stream of the device that nothing else uses.
        unsafe { self.body.prepare(stream) }
    }

    /// Enqueues the work.
    ///
    /// # Safety
    /// `stream` must be a live stream of the kernel's device. The buffers must belong to that device, have
    /// passed [`SimtKernel::check`] at their current addresses, and stay allocated until the work has run.
    pub(super) unsafe fn enqueue(&self, stream: Handle, buffers: &[&SimtBuffer]) -> Result<()> {
        let at: SmallVec<[Address; 6]> = buffers.iter().map(|b| b.address()).collect();
        // SAFETY: `SimtKernel::enqueue` requires a live stream, and buffers that passed `check` at these
        // addresses and stay allocated until the work has run.
        unsafe { self.body.enqueue(stream, &at) }
    }
}

impl LibraryKernel for SimtKernel {
    fn name(&self) -> &str {
        &self.name
    }

    fn workspace(&self) -> usize {
        self.workspace
    }

    fn applies_epilogue(&self) -> bool {
        self.applies_epilogue
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// [`Error::Driver`] for a failed call of a library.
fn failed(context: &Context, library: &str, call: &str, code: Code, text: &str) -> Error {
    Error::Driver {
        device: context.id.clone(),
        call: format!("{call} of {library}"),
        code: format!("status {code} ({text})"),
        next: "Look at the system's log for errors of the GPU; to use generated kernels instead, set the library's environment variable to off"
            .into(),
    }
}
