//! Access by instructions of our own, x86-64: everything that may fault on the program's memory is in one piece of code, which the
//! signal handler knows.
//!
//! Contract between the routines and [`super::handler`]: from the first access to the last, `r8` holds the first and `r9` the end
//! address of the user memory in question; the stack pointer and the callee-saved registers are as at the call. So a fault at an
//! instruction of this code, on an address in `r8..r9`, can be answered by going on at `ferroce_mem_fault`, which returns to the
//! caller with the fault told. No thread-local state, no lock, no unwinding: it is right in every thread and in signal handlers.
//!
//! Copies align the user's side and move 1, 2, 4, 8, then 16 bytes at a time, then 8, 4, 2, 1. Every naturally aligned word up to 8
//! bytes is therefore moved by one instruction (16-byte aligned moves are single accesses on every CPU with AVX, and two of 8 on
//! older ones), and x86 makes stores visible, and does loads, in program order: ascending, the last word last. String instructions
//! would be no faster at packet sizes and may store out of order; non-temporal stores do. Prefetching was measured to gain a fifth on
//! memory outside the cache and to lose a twentieth inside.

use std::arch::global_asm;

use super::Fault;

/// The start of a copy of rdx bytes from rsi to rdi, until the user's side, whose address has this low byte, is a multiple of 16, or fewer
/// bytes are left than the next step needs. Then on at 40 or 20; at 90 if nothing is left.
macro_rules! head {
    ($user:literal) => {
        concat!(
            "    test ",
            $user,
            ", 1\n",
            "    jz 11f\n",
            "    test rdx, rdx\n",
            "    jz 90f\n",
            "    mov al, [rsi]\n",
            "    mov [rdi], al\n",
            "    inc rsi\n",
            "    inc rdi\n",
            "    dec rdx\n",
            "11: test ",
            $user,
            ", 2\n",
            "    jz 12f\n",
            "    cmp rdx, 2\n",
            "    jb 40f\n",
            "    mov ax, [rsi]\n",
            "    mov [rdi], ax\n",
            "    add rsi, 2\n",
            "    add rdi, 2\n",
            "    sub rdx, 2\n",
            "12: test ",
            $user,
            ", 4\n",
            "    jz 13f\n",
            "    cmp rdx, 4\n",
            "    jb 40f\n",
            "    mov eax, [rsi]\n",
            "    mov [rdi], eax\n",
            "    add rsi, 4\n",
            "    add rdi, 4\n",
            "    sub rdx, 4\n",
            "13: test ",
            $user,
            ", 8\n",
            "    jz 20f\n",
            "    cmp rdx, 8\n",
            "    jb 40f\n",
            "    mov rax, [rsi]\n",
            "    mov [rdi], rax\n",
            "    add rsi, 8\n",
            "    add rdi, 8\n",
            "    sub rdx, 8\n",
        )
    };
}

/// The end of a copy: as many bytes as the low four bits of rdx say, and the return.
macro_rules! tail {
    () => {
        concat!(
            "40: test dl, 8\n",
            "    jz 41f\n",
            "    mov rax, [rsi]\n",
            "    mov [rdi], rax\n",
            "    add rsi, 8\n",
            "    add rdi, 8\n",
            "41: test dl, 4\n",
            "    jz 42f\n",
            "    mov eax, [rsi]\n",
            "    mov [rdi], eax\n",
            "    add rsi, 4\n",
            "    add rdi, 4\n",
            "42: test dl, 2\n",
            "    jz 43f\n",
            "    mov ax, [rsi]\n",
            "    mov [rdi], ax\n",
            "    add rsi, 2\n",
            "    add rdi, 2\n",
            "43: test dl, 1\n",
            "    jz 90f\n",
            "    mov al, [rsi]\n",
            "    mov [rdi], al\n",
            "90: xor eax, eax\n",
            "    ret\n",
        )
    };
}

global_asm!(
    ".pushsection .text.ferroce_mem,\"ax\",@progbits",
    ".balign 64",
    ".globl ferroce_mem_begin",
    ".hidden ferroce_mem_begin",
    "ferroce_mem_begin:",
    // u32 ferroce_mem_store(user rdi, ours rsi, len rdx)
    ".globl ferroce_mem_store",
    ".hidden ferroce_mem_store",
    ".type ferroce_mem_store,@function",
    "ferroce_mem_store:",
    ".cfi_startproc",
    "    mov r8, rdi",
    "    lea r9, [rdi + rdx]",
    head!("dil"),
    // Body. Lines are asked for writing a little ahead, but never past the end: they are somebody else's.
    "20: sub rdx, 64",
    "    jb 30f",
    "    cmp rdx, 256",
    "    jb 21f",
    "    .balign 32",
    "22: prefetchw [rdi + 256]",
    "    movups xmm0, [rsi]",
    "    movups xmm1, [rsi + 16]",
    "    movups xmm2, [rsi + 32]",
    "    movups xmm3, [rsi + 48]",
    "    movaps [rdi], xmm0",
    "    movaps [rdi + 16], xmm1",
    "    movaps [rdi + 32], xmm2",
    "    movaps [rdi + 48], xmm3",
    "    add rsi, 64",
    "    add rdi, 64",
    "    sub rdx, 64",
    "    cmp rdx, 256",
    "    jae 22b",
    "    .balign 32",
    "21: movups xmm0, [rsi]",
    "    movups xmm1, [rsi + 16]",
    "    movups xmm2, [rsi + 32]",
    "    movups xmm3, [rsi + 48]",
    "    movaps [rdi], xmm0",
    "    movaps [rdi + 16], xmm1",
    "    movaps [rdi + 32], xmm2",
    "    movaps [rdi + 48], xmm3",
    "    add rsi, 64",
    "    add rdi, 64",
    "    sub rdx, 64",
    "    jae 21b",
    // Fewer than 64 left; rdx is 64 too small, which does not change its low bits.
    "30: test dl, 32",
    "    jz 31f",
    "    movups xmm0, [rsi]",
    "    movups xmm1, [rsi + 16]",
    "    movaps [rdi], xmm0",
    "    movaps [rdi + 16], xmm1",
    "    add rsi, 32",
    "    add rdi, 32",
    "31: test dl, 16",
    "    jz 40f",
    "    movups xmm0, [rsi]",
    "    movaps [rdi], xmm0",
    "    add rsi, 16",
    "    add rdi, 16",
    tail!(),
    ".cfi_endproc",
    ".size ferroce_mem_store, . - ferroce_mem_store",
    // u32 ferroce_mem_load(ours rdi, user rsi, len rdx): the same with the source aligned.
    ".balign 32",
    ".globl ferroce_mem_load",
    ".hidden ferroce_mem_load",
    ".type ferroce_mem_load,@function",
    "ferroce_mem_load:",
    ".cfi_startproc",
    "    mov r8, rsi",
    "    lea r9, [rsi + rdx]",
    ".Lferroce_mem_load_body:",
    head!("sil"),
    // Long ranges by pieces of 4 KiB, each prefetched as a whole.
    "20: cmp rdx, 1024",
    "    jb 25f",
    "22: mov ecx, 4096",
    "    cmp rdx, rcx",
    "    cmovb rcx, rdx",
    "    mov r10, rsi",
    "    lea r11, [rsi + rcx]",
    "23: prefetcht0 [r10]",
    "    add r10, 64",
    "    cmp r10, r11",
    "    jb 23b",
    "    and rcx, -64",
    "    sub rdx, rcx",
    "    .balign 32",
    "24: movaps xmm0, [rsi]",
    "    movaps xmm1, [rsi + 16]",
    "    movaps xmm2, [rsi + 32]",
    "    movaps xmm3, [rsi + 48]",
    "    movups [rdi], xmm0",
    "    movups [rdi + 16], xmm1",
    "    movups [rdi + 32], xmm2",
    "    movups [rdi + 48], xmm3",
    "    add rsi, 64",
    "    add rdi, 64",
    "    sub rcx, 64",
    "    jnz 24b",
    "    cmp rdx, 1024",
    "    jae 22b",
    "25: sub rdx, 64",
    "    jb 30f",
    "    .balign 32",
    "21: movaps xmm0, [rsi]",
    "    movaps xmm1, [rsi + 16]",
    "    movaps xmm2, [rsi + 32]",
    "    movaps xmm3, [rsi + 48]",
    "    movups [rdi], xmm0",
    "    movups [rdi + 16], xmm1",
    "    movups [rdi + 32], xmm2",
    "    movups [rdi + 48], xmm3",
    "    add rsi, 64",
    "    add rdi, 64",
    "    sub rdx, 64",
    "    jae 21b",
    "30: test dl, 32",
    "    jz 31f",
    "    movaps xmm0, [rsi]",
    "    movaps xmm1, [rsi + 16]",
    "    movups [rdi], xmm0",
    "    movups [rdi + 16], xmm1",
    "    add rsi, 32",
    "    add rdi, 32",
    "31: test dl, 16",
    "    jz 40f",
    "    movaps xmm0, [rsi]",
    "    movups [rdi], xmm0",
    "    add rsi, 16",
    "    add rdi, 16",
    tail!(),
    ".cfi_endproc",
    ".size ferroce_mem_load, . - ferroce_mem_load",
    // u32 ferroce_mem_load_shared(shared rdi, user rsi, len rdx): the same where both sides may fault. All addresses are "user memory".
    ".globl ferroce_mem_load_shared",
    ".hidden ferroce_mem_load_shared",
    ".type ferroce_mem_load_shared,@function",
    "ferroce_mem_load_shared:",
    ".cfi_startproc",
    "    xor r8d, r8d",
    "    mov r9, -1",
    "    jmp .Lferroce_mem_load_body",
    ".cfi_endproc",
    ".size ferroce_mem_load_shared, . - ferroce_mem_load_shared",
    // { u64 value, u64 fault } ferroce_mem_load_word(user rdi)
    ".balign 16",
    ".globl ferroce_mem_load_word",
    ".hidden ferroce_mem_load_word",
    ".type ferroce_mem_load_word,@function",
    "ferroce_mem_load_word:",
    ".cfi_startproc",
    "    mov r8, rdi",
    "    lea r9, [rdi + 8]",
    "    mov rax, [rdi]",
    "    xor edx, edx",
    "    ret",
    ".cfi_endproc",
    ".size ferroce_mem_load_word, . - ferroce_mem_load_word",
    // u32 ferroce_mem_store_word(user rdi, value rsi)
    ".balign 16",
    ".globl ferroce_mem_store_word",
    ".hidden ferroce_mem_store_word",
    ".type ferroce_mem_store_word,@function",
    "ferroce_mem_store_word:",
    ".cfi_startproc",
    "    mov r8, rdi",
    "    lea r9, [rdi + 8]",
    "    mov [rdi], rsi",
    "    xor eax, eax",
    "    ret",
    ".cfi_endproc",
    ".size ferroce_mem_store_word, . - ferroce_mem_store_word",
    // { u64 old, u64 fault } ferroce_mem_compare_swap(user rdi, compare rsi, swap rdx)
    ".balign 32",
    ".globl ferroce_mem_compare_swap",
    ".hidden ferroce_mem_compare_swap",
    ".type ferroce_mem_compare_swap,@function",
    "ferroce_mem_compare_swap:",
    ".cfi_startproc",
    "    mov r8, rdi",
    "    lea r9, [rdi + 8]",
    "    mov rax, rsi",
    "    lock cmpxchg [rdi], rdx",
    "    xor edx, edx",
    "    ret",
    ".cfi_endproc",
    ".size ferroce_mem_compare_swap, . - ferroce_mem_compare_swap",
    // { u64 old, u64 fault } ferroce_mem_fetch_add(user rdi, add rsi)
    ".globl ferroce_mem_fetch_add",
    ".hidden ferroce_mem_fetch_add",
    ".type ferroce_mem_fetch_add,@function",
    "ferroce_mem_fetch_add:",
    ".cfi_startproc",
    "    mov r8, rdi",
    "    lea r9, [rdi + 8]",
    "    mov rax, rsi",
    "    lock xadd [rdi], rax",
    "    xor edx, edx",
    "    ret",
    ".cfi_endproc",
    ".size ferroce_mem_fetch_add, . - ferroce_mem_fetch_add",
    ".globl ferroce_mem_end",
    ".hidden ferroce_mem_end",
    "ferroce_mem_end:",
    // Where the handler goes on: returns the fault in the registers of either kind of result.
    ".globl ferroce_mem_fault",
    ".hidden ferroce_mem_fault",
    ".type ferroce_mem_fault,@function",
    "ferroce_mem_fault:",
    ".cfi_startproc",
    "    mov eax, 1",
    "    mov edx, 1",
    "    ret",
    ".cfi_endproc",
    ".size ferroce_mem_fault, . - ferroce_mem_fault",
    ".popsection",
);

unsafe extern "C" {
    static ferroce_mem_begin: u8;
    static ferroce_mem_end: u8;
    static ferroce_mem_fault: u8;
    fn ferroce_mem_store(user: usize, ours: *const u8, len: usize) -> u32;
    fn ferroce_mem_load(ours: *mut u8, user: usize, len: usize) -> u32;
    fn ferroce_mem_load_shared(shared: *mut u8, user: usize, len: usize) -> u32;
    fn ferroce_mem_load_word(user: usize) -> Word;
    fn ferroce_mem_store_word(user: usize, value: u64) -> u32;
    fn ferroce_mem_compare_swap(user: usize, compare: u64, swap: u64) -> Word;
    fn ferroce_mem_fetch_add(user: usize, add: u64) -> Word;
}

/// Result of an access to a word, in two registers.
#[repr(C)]
struct Word {
    old: u64,
    fault: u64,
}

impl Word {
    fn into_result(self) -> Result<u64, Fault> {
        if self.fault == 0 { Ok(self.old) } else { Err(Fault) }
    }
}

/// Copies `data` to the memory at `addr`.
#[inline]
pub(super) fn write(addr: u64, data: &[u8]) -> Result<(), Fault> {
    // SAFETY: reads exactly the borrowed slice; writes `data.len()` bytes at `addr`, which the module's invariant allows; a fault
    // there is answered by the handler (the caller checked that it is in place). The ABI is that of the declaration.
    let fault = unsafe { ferroce_mem_store(addr as usize, data.as_ptr(), data.len()) };
    if fault == 0 { Ok(()) } else { Err(Fault) }
}

/// Copies `len` bytes of the memory at `addr` to `buffer`.
///
/// # Safety
/// `buffer` is valid for writes of `len` bytes.
#[inline]
pub(super) unsafe fn read(addr: u64, buffer: *mut u8, len: usize) -> Result<(), Fault> {
    // SAFETY: writes exactly what the caller vouches for; the reads are as in `write`.
    let fault = unsafe { ferroce_mem_load(buffer, addr as usize, len) };
    if fault == 0 { Ok(()) } else { Err(Fault) }
}

/// [`read`] into memory that may be gone, too.
///
/// # Safety
/// Whatever of the `len` bytes at `buffer` is mapped may be written.
#[inline]
pub(super) unsafe fn read_shared(addr: u64, buffer: *mut u8, len: usize) -> Result<(), Fault> {
    // SAFETY: as in `read`; faults of the writes are answered by the handler as well.
    let fault = unsafe { ferroce_mem_load_shared(buffer, addr as usize, len) };
    if fault == 0 { Ok(()) } else { Err(Fault) }
}

/// Reads the word at `addr`: one instruction, and so an acquire load.
#[inline]
pub(super) fn load_word(addr: u64) -> Result<u64, Fault> {
    // SAFETY: reads only the word at `addr`, which the module's invariant allows; faults as in `write`.
    unsafe { ferroce_mem_load_word(addr as usize) }.into_result()
}

/// Writes the word at `addr`: one instruction, and so a release store.
#[inline]
pub(super) fn store_word(addr: u64, value: u64) -> Result<(), Fault> {
    // SAFETY: writes only the word at `addr`, which the module's invariant allows; faults as in `write`.
    let fault = unsafe { ferroce_mem_store_word(addr as usize, value) };
    if fault == 0 { Ok(()) } else { Err(Fault) }
}

/// Compares and swaps the word at `addr`; gives the old value.
#[inline]
pub(super) fn compare_swap(addr: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
    // SAFETY: changes only the word at `addr`, which the module's invariant allows; faults as in `write`.
    unsafe { ferroce_mem_compare_swap(addr as usize, compare, swap) }.into_result()
}

/// Adds to the word at `addr`; gives the old value.
#[inline]
pub(super) fn fetch_add(addr: u64, add: u64) -> Result<u64, Fault> {
    // SAFETY: as in `compare_swap`.
    unsafe { ferroce_mem_fetch_add(addr as usize, add) }.into_result()
}

/// For the signal handler: if the interrupted code is ours and `fault_addr` (`None`: the CPU told none) is the user memory it was
/// about to touch, makes it go on at the failure exit.
pub(super) fn fix_up(context: &mut libc::ucontext_t, fault_addr: Option<usize>) -> bool {
    let registers = &mut context.uc_mcontext.gregs;
    let code = (&raw const ferroce_mem_begin) as usize..(&raw const ferroce_mem_end) as usize;
    if !code.contains(&(registers[libc::REG_RIP as usize] as usize)) {
        return false;
    }
    let memory = registers[libc::REG_R8 as usize] as usize..registers[libc::REG_R9 as usize] as usize;
    if fault_addr.is_some_and(|addr| !memory.contains(&addr)) {
        return false;
    }
    registers[libc::REG_RIP as usize] = (&raw const ferroce_mem_fault) as usize as libc::greg_t;
    true
}
