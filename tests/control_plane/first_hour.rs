//! The first hour of a new user, through the command line: data of their own, mistakes and their messages, the lines on
//! the terminal, and runs that are repeated, extended, listed and exported.

mod log_lines;
mod mistakes;
mod own_data;
mod readme;
mod runs;
mod seen;
