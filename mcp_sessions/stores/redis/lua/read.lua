-- needs: session log
-- ARGV: stream, now, new log epoch, window (3), why the position is none, its epoch, its number,
-- limit of a page or nothing, its bytes
local ends = redis.call('HGET', base, 'ends')
local log = ends and open_log(ARGV[1], ARGV[3], seconds(ends))
if not log then
    return { 'unknown_position' }
end
local window = window_of(log, seconds(ends), ARGV[4], ARGV[5], ARGV[6])
local entries, reason = since(
    log, tonumber(ARGV[2]), window, ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11])
return { reason or false, log.epoch, entries or {} }
