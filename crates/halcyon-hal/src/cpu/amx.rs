//! The tile registers of AMX (Intel's Advanced Matrix Extensions): whether this process may use them, a guard
//! for their configuration, and their instructions.
//!
//! Eight registers `tmm0` to `tmm7` hold up to 16 rows of 64 bytes. A product `C += A B` takes A with rows of
//! `4 K` bytes (K lanes of two bf16 or four bytes), B with K rows, row `l` holding lane `l` of each column,
//! and C with 4-byte sums. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1
//! chapter "Programming with Intel AMX", volume 2 for the instructions.
//!
//! `tdpbf16ps` rounds every step to nearest even and takes denormal operands and results as zero, whatever
//! MXCSR says; the byte products are exact in 32 bits, which wrap.
//!
//! The system saves tile registers for processes that asked for them alone: [`available`] asks Linux once
//! (`arch_prctl` with `ARCH_REQ_XCOMP_PERM`). Elsewhere, and where it refuses, there are no tiles.

use std::sync::OnceLock;

/// What this process can do with tile registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Amx {
    /// Products of bf16 (AMX-BF16).
    pub bf16: bool,
    /// Products of 8-bit integers (AMX-INT8).
    pub int8: bool,
}

/// What the processor has, the system permits and [`super::isa::VARIABLE`] allows.
#[inline]
pub fn available() -> Amx {
    if super::isa::IsaLevel::Amx.allowed() { detected() } else { Amx::default() }
}

/// What the processor has and the system permits. Detected and asked for once; neither on other architectures
/// than x86-64 nor on other systems than Linux.
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
    /// State components of XCR0: tile configuration and tile data.
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

/// The state components that the system has enabled.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn xcr0() -> u64 {
    let (lo, hi): (u32, u32);
    // SAFETY: reads a control register; the caller has seen OSXSAVE, so the instruction is enabled.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") lo, out("edx") hi,
            options(nomem, nostack, preserves_flags));
    }
    u64::from(hi) << 32 | u64::from(lo)
}

/// Asks for the use of tile data, for every thread of the process.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let answer: i64;
    // SAFETY: a system call that touches no memory of this process; the registers it changes are named.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") ARCH_PRCTL => answer, in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    answer == 0
}

/// Rows and bytes from row to row of each of the eight registers, as `ldtilecfg` reads them (palette 1).
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TileConfig([u8; 64]);

impl TileConfig {
    /// Eight registers of (rows, bytes of a row).
    ///
    /// # Panics
    /// When a register would have no or more than 16 rows, or no or more than 64 bytes in a row.
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

    /// All registers with 16 rows of 64 bytes.
    pub const FULL: TileConfig = TileConfig::new([(16, 64); 8]);

    /// For a product of two tiles of rows by two of columns with 64 bytes of K: sums of (`top`, `below`) rows
    /// in registers 0, 1 and 2, 3, the rows of A in 4 and 5, and full tiles of B in 6 and 7.
    ///
    /// # Panics
    /// As [`TileConfig::new`].
    pub const fn two_by_two(top: u8, below: u8) -> TileConfig {
        let (t, b, f) = ((top, 64), (below, 64), (16, 64));
        TileConfig::new([t, t, b, b, t, b, f, f])
    }
}

/// While it lives, the calling thread's tile registers are configured; they are released afterwards, so that
/// the system need not save them.
#[cfg(target_arch = "x86_64")]
#[derive(Debug)]
pub struct Tiles {
    config: TileConfig,
    /// The registers belong to the thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

#[cfg(target_arch = "x86_64")]
impl Tiles {
    /// Configures the registers and clears them. One guard at a time for each thread: another one's
    /// configuration and contents would be lost.
    ///
    /// # Panics
    /// Where [`available`] names nothing.
    #[inline]
    pub fn new(config: &TileConfig) -> Tiles {
        assert!(available() != Amx::default(), "this process has no tile registers");
        // SAFETY: tiles were checked.
        unsafe { load_config(config) };
        Tiles { config: *config, _not_send: std::marker::PhantomData }
    }

    /// Another configuration, where it is another one. All registers are cleared then.
    #[inline]
    pub fn configure(&mut self, config: &TileConfig) {
        if self.config != *config {
            // SAFETY: tiles were checked when this was made.
            unsafe { load_config(config) };
            self.config = *config;
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for Tiles {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: this exists, so there are tiles.
        unsafe { std::arch::asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

/// # Safety
/// There are tile registers.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn load_config(config: &TileConfig) {
    // SAFETY: 64 readable bytes, valid by construction.
    unsafe { std::arch::asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly, preserves_flags)) };
}

/// The instructions, by number of register. Code that the compiler makes by itself never touches the
/// registers: they keep their contents from one call to the next while a [`Tiles`] guard lives.
#[cfg(target_arch = "x86_64")]
pub mod tile {
    use std::arch::asm;

    /// Register T := its rows of bytes at `p`, `stride` bytes apart (`tileloadd`).
    ///
    /// # Safety
    /// A [`super::Tiles`] guard lives on this thread; every row is readable.
    #[inline(always)]
    pub unsafe fn load<const T: u8>(p: *const u8, stride: isize) {
        // SAFETY: the caller's.
        unsafe {
            asm!("tileloadd tmm{t}, [{p} + {s}*1]", t = const T, p = in(reg) p, s = in(reg) stride,
                options(nostack, readonly, preserves_flags));
        }
    }

    /// [`load`] for bytes that are not soon read again (`tileloaddt1`).
    ///
    /// # Safety
    /// As [`load`].
    #[inline(always)]
    pub unsafe fn load_once<const T: u8>(p: *const u8, stride: isize) {
        // SAFETY: the caller's.
        unsafe {
            asm!("tileloaddt1 tmm{t}, [{p} + {s}*1]", t = const T, p = in(reg) p, s = in(reg) stride,
                options(nostack, readonly, preserves_flags));
        }
    }

    /// Writes register T's rows to `p`, `stride` bytes apart (`tilestored`).
    ///
    /// # Safety
    /// A [`super::Tiles`] guard lives on this thread; every row is writable.
    #[inline(always)]
    pub unsafe fn store<const T: u8>(p: *mut u8, stride: isize) {
        // SAFETY: the caller's.
        unsafe {
            asm!("tilestored [{p} + {s}*1], tmm{t}", t = const T, p = in(reg) p, s = in(reg) stride,
                options(nostack, preserves_flags));
        }
    }

    /// Clears register T (`tilezero`).
    ///
    /// # Safety
    /// A [`super::Tiles`] guard lives on this thread.
    #[inline(always)]
    pub unsafe fn zero<const T: u8>() {
        // SAFETY: the caller's.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nomem, nostack, preserves_flags)) };
    }

    macro_rules! product {
        ($(#[$doc:meta])* $name:ident, $code:literal) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// A [`super::Tiles`] guard lives on this thread, the processor has the instruction, and the
            /// three registers differ and fit each other: C has A's rows and B's bytes of a row, B a row for
            /// every 4 bytes of a row of A.
            #[inline(always)]
            pub unsafe fn $name<const C: u8, const A: u8, const B: u8>() {
                // SAFETY: the caller's.
                unsafe {
                    asm!(concat!($code, " tmm{c}, tmm{a}, tmm{b}"), c = const C, a = const A, b = const B,
                        options(nomem, nostack, preserves_flags));
                }
            }
        };
    }
    product! {
        /// `C += A B`, pairs of bf16 into f32.
        bf16, "tdpbf16ps"
    }
    product! {
        /// `C += A B`, quads of signed times signed bytes into i32.
        i8_i8, "tdpbssd"
    }
    product! {
        /// `C += A B`, quads of signed times unsigned bytes into i32.
        i8_u8, "tdpbsud"
    }
    product! {
        /// `C += A B`, quads of unsigned times signed bytes into i32.
        u8_i8, "tdpbusd"
    }
    product! {
        /// `C += A B`, quads of unsigned times unsigned bytes into i32.
        u8_u8, "tdpbuud"
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use half::bf16;

    /// (rows of A, lanes of K, columns)
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
            // Strides with room that must stay as it is, and eighths of small integers: every sum is exact.
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
            // SAFETY: the guard lives, every row is inside its vector, and the registers fit.
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
        // SAFETY: as above.
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
                // SAFETY: as above.
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
        // SAFETY: as above.
        unsafe {
            tile::load::<5>(from.as_ptr(), 64);
            // The same again changes nothing.
            tiles.configure(&TileConfig::FULL);
            tile::store::<5>(to.as_mut_ptr(), 64);
            assert_eq!(from, to);
            tiles.configure(&TileConfig::two_by_two(16, 3));
            tile::store::<5>(to.as_mut_ptr(), 64);
        }
        assert!(to[..3 * 64].iter().all(|x| *x == 0) && to[3 * 64..].iter().all(|x| *x == 7));
    }
}
