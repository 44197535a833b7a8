"""Kernels of several GPUs of one process, which write to each other's memory while they run.

sizes            what goes through a mailbox, and which thread has what
mailbox          where a device puts numbers for others, and how these know that all have come
numbers          what a thread does with words that are several numbers
add_up           a sum over devices
add_up_and_norm  a sum over devices, added to the hidden states, and the norm of that
collect          a gather
collect_heads    a gather of heads, in the kernel that norms and rotates them, and stores K and V
por              POR across devices: each gets the merged rows of its heads
"""
