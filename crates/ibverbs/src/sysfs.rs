//! Reading sysfs through the library. Ferroce's devices are not in the kernel's sysfs, so their few files are answered here.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::Path;

use crate::entry::{MinusOne, Pointer, Refusal, Verb, verb};

/// Where sysfs is mounted; NUL-terminated in the binary for C.
const SYSFS: &CStr = c"/sys";

/// The directory of an RDMA device below sysfs.
const CLASS: &str = "/sys/class/infiniband/";

/// A file of one of our devices, if the directory is one of theirs.
fn own(directory: &str, file: &str) -> Option<Verb<String>> {
    let (name, rest) = match directory.strip_prefix(CLASS)?.split_once('/') {
        Some((name, rest)) => (name, format!("{rest}/{file}")),
        None => (directory.strip_prefix(CLASS)?, file.to_owned()),
    };
    let device = ferroce::devices().ok()?.into_iter().find(|device| device.name() == name)?;
    Some(content(&device, &rest))
}

/// What the file would hold if the kernel knew the device.
fn content(device: &ferroce::Device, file: &str) -> Verb<String> {
    let guid = device.guid();
    let part = |shift: u32| (guid >> shift) & 0xffff;
    Ok(match file.trim_matches('/') {
        "node_guid" | "sys_image_guid" => format!("{:04x}:{:04x}:{:04x}:{:04x}", part(48), part(32), part(16), part(0)),
        "node_type" => "1: CA".to_owned(),
        "node_desc" => device.name().to_owned(),
        "fw_ver" => env!("CARGO_PKG_VERSION").to_owned(),
        "ports/1/link_layer" => "Ethernet".to_owned(),
        _ => return Err(Refusal::routine(libc::ENOENT, "the device has no such file")),
    })
}

/// The text of a file, without the line end.
fn read(directory: &str, file: &str) -> Verb<String> {
    if let Some(own) = own(directory, file) {
        return own;
    }
    let path = Path::new(directory).join(file.trim_start_matches('/'));
    match std::fs::read(&path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\n').to_owned()),
        Err(error) => Err(Refusal::routine(error.raw_os_error().unwrap_or(libc::EIO), "the file cannot be read")),
    }
}

verb! {
    /// Where sysfs is.
    fn ibv_get_sysfs_path() -> Pointer<c_char> {
        Ok(SYSFS.as_ptr().cast_mut())
    }

    /// Reads a file of sysfs without its line end and terminates it with NUL. Gives its length.
    fn ibv_read_sysfs_file(directory: *const c_char, file: *const c_char, buffer: *mut c_char, size: usize) -> MinusOne {
        if directory.is_null() || file.is_null() || buffer.is_null() || size == 0 {
            return Err(Refusal::invalid("dir, file or buf is NULL, or size is 0"));
        }
        // SAFETY: not NULL, so they are strings of the caller.
        let (directory, file) = unsafe { (CStr::from_ptr(directory), CStr::from_ptr(file)) };
        let text = read(&directory.to_string_lossy(), &file.to_string_lossy())?;
        let length = text.len().min(size - 1);
        // SAFETY: the caller has `size` bytes there, and `length` is below that.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, length);
            buffer.add(length).write(0);
        }
        Ok(length as c_int)
    }

    /// Private, for providers: there is no kernel device to read of.
    fn ibv_read_ibdev_sysfs_file(_buffer: *mut c_char, _size: usize, _device: *mut c_uint, _format: *const c_char) -> MinusOne {
        Err(Refusal::routine(libc::ENOENT, "there is no kernel device"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_files_are_read_without_their_line_end() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("file"), "abc\n").unwrap();
        let path = directory.path().to_str().unwrap();
        assert_eq!(read(path, "file").unwrap(), "abc");
        assert_eq!(read(path, "absent").unwrap_err().errno(), libc::ENOENT);
    }

    #[test]
    fn short_buffers_get_a_terminated_beginning() {
        let mut buffer = [0x55 as c_char; 4];
        // SAFETY: strings and a buffer of four bytes.
        let length =
            unsafe { ibv_read_sysfs_file(c"/proc/self".as_ptr(), c"comm".as_ptr(), buffer.as_mut_ptr(), buffer.len()) };
        assert_eq!(length, 3);
        assert_eq!(buffer[3], 0);
    }
}
