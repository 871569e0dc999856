"""Memory, work and communication of programs on TPUs that this machine lacks, from the TPU's compiler."""
