//! The tile registers of AMX (Intel's Advanced Matrix Extensions): whether this process may use them, a guard
//! for their configuration, and their instructions.
//!
//! Each of the eight registers `tmm0` to `tmm7` holds up to 16 rows of up to 64 bytes. Take a product
//! `C += A B` over `n` K groups (of two bf16 or four bytes each). A row of A has `4 n` bytes. B has `n` rows;
//! row `l` holds K group `l` of every column. C holds 4-byte sums. Source: Intel 64 and IA-32 Architectures
//! Software Developer's Manual, volume 1 chapter "Programming with Intel AMX", volume 2 for the instructions.
//!
//! `tdpbf16ps` rounds every step to nearest even and treats denormal operands and results as zero, regardless
//! of MXCSR. The byte products are exact in 32 bits, and their sums wrap.
//!
//! The operating system must enable tile registers per process. [`available`] requests them from Linux once
//! (`arch_prctl` with `ARCH_REQ_XCOMP_PERM`). On other systems, and if Linux refuses, there are no tile
//! registers.

use std::sync::OnceLock;

/// The AMX instructions that this process may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Amx {
    /// Products of bf16 (AMX-BF16).
    pub bf16: bool,
    /// Products of 8-bit integers (AMX-INT8).
    pub int8: bool,
}

/// The AMX instructions that the processor supports, the system permits and [`super::isa::VARIABLE`] allows.
#[inline]
pub fn available() -> Amx {
    if super::isa::IsaLevel::Amx.allowed() { detected() } else { Amx::default() }
}

/// The AMX instructions that the processor supports and the system permits. The process detects and requests
/// them once. The set is always empty except on x86-64 Linux.
pub(crate) fn detected() -> Amx {
    static AMX: OnceLock<Amx> = OnceLock::new();
    *AMX.get_or_init(detect)
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn detect() -> Amx {
    Amx::default()
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn detect() -> Amx {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    /// State components of XCR0: tile configuration (bit 17) and tile data (bit 18).
    const TILES: u64 = 1 << 17 | 1 << 18;
    const OSXSAVE: u32 = 1 << 27;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
        return Amx::default();
    }
    let edx = __cpuid_count(7, 0).edx;
    let bit = |i: u32| edx >> i & 1 == 1;
    if !bit(24) || xcr0() & TILES != TILES || !permitted() {
        return Amx::default();
    }
    Amx { bf16: bit(22), int8: bit(25) }
}

/// Reads XCR0: the state components that the system has enabled.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn xcr0() -> u64 {
    let (lo, hi): (u32, u32);
    // SAFETY: `xgetbv` only reads a control register. `detect`, which calls this function, has checked
    // OSXSAVE, so the instruction is enabled.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") lo, out("edx") hi,
            options(nomem, nostack, preserves_flags));
    }
    u64::from(hi) << 32 | u64::from(lo)
}

/// Requests the use of tile data for every thread of the process.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let answer: i64;
    // SAFETY: this system call accesses no memory of the process, and the registers it changes are declared.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") ARCH_PRCTL => answer, in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    answer == 0
}

/// The operand of `ldtilecfg` (palette 1): rows and bytes per row of each of the eight registers.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TileConfig([u8; 64]);

impl TileConfig {
    /// A configuration from (rows, bytes per row) of each register.
    ///
    /// # Panics
    /// If a register would have 0 or more than 16 rows, or 0 or more than 64 bytes per row.
    pub const fn new(tiles: [(u8, u8); 8]) -> TileConfig {
        let mut c = [0u8; 64];
        c[0] = 1;
        let mut i = 0;
        while i < 8 {
            let (rows, bytes) = tiles[i];
            assert!(
                rows >= 1 && rows <= 16 && bytes >= 1 && bytes <= 64,
                "a tile has 1..=16 rows of 1..=64 bytes"
            );
            c[16 + 2 * i] = bytes;
            c[48 + i] = rows;
            i += 1;
        }
        TileConfig(c)
    }

    /// All registers have 16 rows of 64 bytes.
    pub const FULL: TileConfig = TileConfig::new([(16, 64); 8]);

    /// Configuration for products of two row tiles by two column tiles with 64 bytes of K. Registers 0 and 1
    /// hold sums of `top` rows, 2 and 3 of `below` rows, 4 and 5 the rows of A, 6 and 7 full tiles of B.
    ///
    /// # Panics
    /// If [`TileConfig::new`] panics for these sizes.
    pub const fn two_by_two(top: u8, below: u8) -> TileConfig {
        let (t, b, f) = ((top, 64), (below, 64), (16, 64));
        TileConfig::new([t, t, b, b, t, b, f, f])
    }
}

/// Keeps the calling thread's tile registers configured while this value lives. Dropping it releases the
/// registers, so that the system need not save them on context switches.
#[cfg(target_arch = "x86_64")]
#[derive(Debug)]
pub struct Tiles {
    config: TileConfig,
    /// Makes the guard `!Send`, because the registers belong to the thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

#[cfg(target_arch = "x86_64")]
impl Tiles {
    /// Configures and clears the registers. Use one guard at a time per thread: a second one overwrites the
    /// first one's configuration and contents, and dropping either of them releases the registers.
    ///
    /// # Panics
    /// If [`available`] reports no tile registers.
    #[inline]
    pub fn new(config: &TileConfig) -> Tiles {
        assert!(available() != Amx::default(), "this process has no tile registers");
        // SAFETY: the assertion above checked that tile registers are available.
        unsafe { load_config(config) };
        Tiles { config: *config, _not_send: std::marker::PhantomData }
    }

    /// Loads another configuration, which clears all registers. Does nothing if the configuration is the
    /// same.
    #[inline]
    pub fn configure(&mut self, config: &TileConfig) {
        if self.config != *config {
            // SAFETY: `Tiles::new` checked that tile registers are available.
            unsafe { load_config(config) };
            self.config = *config;
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for Tiles {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `Tiles::new` checked that tile registers are available.
        unsafe { std::arch::asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

/// Loads a configuration.
///
/// # Safety
/// Tile registers are available.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn load_config(config: &TileConfig) {
    // SAFETY: `config` points to 64 readable bytes, which `TileConfig::new` made valid. The contract of
    // `load_config` says that tile registers are available.
    unsafe { std::arch::asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly, preserves_flags)) };
}

/// The AMX instructions, with register numbers as generic parameters. Compiler-generated code never uses
/// these registers, so they keep their contents between calls while a [`Tiles`] guard lives.
#[cfg(target_arch = "x86_64")]
pub mod tile {
    use std::arch::asm;

    /// Loads register T: rows of bytes from `p`, `stride` bytes apart (`tileloadd`).
    ///
    /// # Safety
    /// The [`super::Tiles`] guard that this thread made last is alive, and no older guard was dropped after
    /// it was made; every configured row is readable.
    #[inline(always)]
    pub unsafe fn load<const T: u8>(p: *const u8, stride: isize) {
        // SAFETY: the contract of `load` gives a live guard and readable rows.
        unsafe {
            asm!("tileloadd tmm{t}, [{p} + {s}*1]", t = const T, p = in(reg) p, s = in(reg) stride,
                options(nostack, readonly, preserves_flags));
        }
    }

    /// [`load`] with a hint that the bytes are not read again soon (`tileloaddt1`).
    ///
    /// # Safety
    /// The [`super::Tiles`] guard that this thread made last is alive, and no older guard was dropped after
    /// it was made; every configured row is readable.
    #[inline(always)]
    pub unsafe fn load_once<const T: u8>(p: *const u8, stride: isize) {
        // SAFETY: the contract of `load_once` gives a live guard and readable rows.
        unsafe {
            asm!("tileloaddt1 tmm{t}, [{p} + {s}*1]", t = const T, p = in(reg) p, s = in(reg) stride,
                options(nostack, readonly, preserves_flags));
        }
    }

    /// Stores register T: its rows to `p`, `stride` bytes apart (`tilestored`).
    ///
    /// # Safety
    /// The [`super::Tiles`] guard that this thread made last is alive, and no older guard was dropped after
    /// it was made; every configured row is writable.
    #[inline(always)]
    pub unsafe fn store<const T: u8>(p: *mut u8, stride: isize) {
        // SAFETY: the contract of `store` gives a live guard and writable rows.
        unsafe {
            asm!("tilestored [{p} + {s}*1], tmm{t}", t = const T, p = in(reg) p, s = in(reg) stride,
                options(nostack, preserves_flags));
        }
    }

    /// Clears register T (`tilezero`).
    ///
    /// # Safety
    /// The [`super::Tiles`] guard that this thread made last is alive, and no older guard was dropped after
    /// it was made.
    #[inline(always)]
    pub unsafe fn zero<const T: u8>() {
        // SAFETY: the contract of `zero` gives a live guard; no memory is accessed.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nomem, nostack, preserves_flags)) };
    }

    macro_rules! product {
        ($(#[$doc:meta])* $name:ident, $code:literal) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// The [`super::Tiles`] guard that this thread made last is alive, and no older guard was dropped
            /// after it was made; the processor has the instruction; the three registers differ and have
            /// matching sizes: C has as many rows as A and as many bytes per row as B, and B has one row for
            /// every 4 bytes of a row of A.
            #[inline(always)]
            pub unsafe fn $name<const C: u8, const A: u8, const B: u8>() {
                // SAFETY: the function's contract gives a live guard and matching registers; no memory is
                // accessed.
                unsafe {
                    asm!(concat!($code, " tmm{c}, tmm{a}, tmm{b}"), c = const C, a = const A, b = const B,
                        options(nomem, nostack, preserves_flags));
                }
            }
        };
    }
    product! {
        /// `C += A B` of pairs of bf16, summed in f32.
        bf16, "tdpbf16ps"
    }
    product! {
        /// `C += A B` of groups of four bytes, signed in A and in B, summed in i32.
        i8_i8, "tdpbssd"
    }
    product! {
        /// `C += A B` of groups of four bytes, signed in A and unsigned in B, summed in i32.
        i8_u8, "tdpbsud"
    }
    product! {
        /// `C += A B` of groups of four bytes, unsigned in A and signed in B, summed in i32.
        u8_i8, "tdpbusd"
    }
    product! {
        /// `C += A B` of groups of four bytes, unsigned in A and in B, summed in i32.
        u8_u8, "tdpbuud"
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use half::bf16;

    /// (rows of A, K groups, columns)
    const SHAPES: [(usize, usize, usize); 6] =
        [(16, 16, 16), (1, 1, 1), (5, 16, 16), (16, 3, 16), (16, 16, 7), (9, 11, 13)];

    fn guard(rows: usize, lanes: usize, cols: usize) -> Tiles {
        let (c, a, b) =
            ((rows as u8, 4 * cols as u8), (rows as u8, 4 * lanes as u8), (lanes as u8, 4 * cols as u8));
        Tiles::new(&TileConfig::new([c, c, a, b, c, c, a, b]))
    }

    struct Bytes(u64);
    impl Bytes {
        fn next(&mut self) -> u8 {
            self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (self.0 >> 40) as u8
        }
    }

    #[test]
    fn pairs_of_bf16_are_multiplied_in_tiles_of_every_size() {
        if !available().bf16 {
            eprintln!("not run: no AMX-BF16 here");
            return;
        }
        let mut random = Bytes(7);
        for (rows, lanes, cols) in SHAPES {
            // The strides leave gaps that must not change. Values are eighths of small integers: every sum is
            // exact.
            let (sa, sb, sc) = (2 * lanes + 3, 2 * cols + 5, cols + 2);
            let mut value = || bf16::from_f32(f32::from(random.next() as i8) / 8.0);
            let a: Vec<bf16> = (0..rows * sa).map(|_| value()).collect();
            let b: Vec<bf16> = (0..lanes * sb).map(|_| value()).collect();
            let mut c: Vec<f32> = (0..rows * sc).map(|_| value().to_f32()).collect();
            let mut want = c.clone();
            for i in 0..rows {
                for j in 0..cols {
                    for l in 0..2 * lanes {
                        want[i * sc + j] += a[i * sa + l].to_f32() * b[l / 2 * sb + 2 * j + l % 2].to_f32();
                    }
                }
            }
            let _tiles = guard(rows, lanes, cols);
            // SAFETY: the guard lives, every row lies inside its vector, and `guard` gave the registers
            // matching sizes.
            unsafe {
                tile::load::<0>(c.as_ptr().cast(), 4 * sc as isize);
                tile::load::<2>(a.as_ptr().cast(), 2 * sa as isize);
                tile::load_once::<3>(b.as_ptr().cast(), 2 * sb as isize);
                tile::bf16::<0, 2, 3>();
                tile::store::<0>(c.as_mut_ptr().cast(), 4 * sc as isize);
            }
            assert_eq!(c, want, "{rows} x {lanes} x {cols}");
        }
    }

    #[test]
    fn denormals_count_as_zero() {
        if !available().bf16 {
            eprintln!("not run: no AMX-BF16 here");
            return;
        }
        let (a, b) = ([bf16::from_bits(0x0040), bf16::ONE], [bf16::ONE, bf16::from_f32(3.0)]);
        let mut c = [f32::NAN];
        let _tiles = guard(1, 1, 1);
        // SAFETY: the guard lives, each register has one row of 4 bytes, and each array holds 4 bytes.
        unsafe {
            tile::zero::<1>();
            tile::load::<2>(a.as_ptr().cast(), 4);
            tile::load::<3>(b.as_ptr().cast(), 4);
            tile::bf16::<1, 2, 3>();
            tile::store::<1>(c.as_mut_ptr().cast(), 4);
        }
        assert_eq!(c, [3.0]);
    }

    #[test]
    fn quads_of_bytes_are_multiplied_exactly_in_tiles_of_every_size() {
        if !available().int8 {
            eprintln!("not run: no AMX-INT8 here");
            return;
        }
        let mut random = Bytes(11);
        for (rows, lanes, cols) in SHAPES {
            let (sa, sb, sc) = (4 * lanes + 7, 4 * cols + 9, cols + 2);
            let a: Vec<u8> = (0..rows * sa).map(|_| random.next()).collect();
            let b: Vec<u8> = (0..lanes * sb).map(|_| random.next()).collect();
            let first: Vec<i32> = (0..rows * sc).map(|_| i32::from(random.next()) << 20).collect();
            for (signed_a, signed_b) in [(true, true), (true, false), (false, true), (false, false)] {
                let wide = |x: u8, signed: bool| if signed { i32::from(x as i8) } else { i32::from(x) };
                let (mut c, mut want) = (first.clone(), first.clone());
                for i in 0..rows {
                    for j in 0..cols {
                        for l in 0..4 * lanes {
                            want[i * sc + j] +=
                                wide(a[i * sa + l], signed_a) * wide(b[l / 4 * sb + 4 * j + l % 4], signed_b);
                        }
                    }
                }
                let _tiles = guard(rows, lanes, cols);
                // SAFETY: the guard lives, every row lies inside its vector, and `guard` gave matching sizes.
                unsafe {
                    tile::load::<0>(c.as_ptr().cast(), 4 * sc as isize);
                    tile::load::<2>(a.as_ptr().cast(), sa as isize);
                    tile::load::<3>(b.as_ptr().cast(), sb as isize);
                    match (signed_a, signed_b) {
                        (true, true) => tile::i8_i8::<0, 2, 3>(),
                        (true, false) => tile::i8_u8::<0, 2, 3>(),
                        (false, true) => tile::u8_i8::<0, 2, 3>(),
                        (false, false) => tile::u8_u8::<0, 2, 3>(),
                    }
                    tile::store::<0>(c.as_mut_ptr().cast(), 4 * sc as isize);
                }
                assert_eq!(c, want, "{rows} x {lanes} x {cols}, {signed_a} {signed_b}");
            }
        }
    }

    #[test]
    fn another_configuration_clears_the_registers() {
        if available() == Amx::default() {
            eprintln!("not run: no tile registers here");
            return;
        }
        let (from, mut to) = ([7u8; 1024], [1u8; 1024]);
        let mut tiles = Tiles::new(&TileConfig::FULL);
        // SAFETY: `tiles` lives, and both arrays hold 16 rows of 64 bytes.
        unsafe {
            tile::load::<5>(from.as_ptr(), 64);
            // Loading an equal configuration does not change the registers.
            tiles.configure(&TileConfig::FULL);
            tile::store::<5>(to.as_mut_ptr(), 64);
            assert_eq!(from, to);
            tiles.configure(&TileConfig::two_by_two(16, 3));
            tile::store::<5>(to.as_mut_ptr(), 64);
        }
        assert!(to[..3 * 64].iter().all(|x| *x == 0) && to[3 * 64..].iter().all(|x| *x == 7));
    }
}
