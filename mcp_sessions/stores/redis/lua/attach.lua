-- needs: session log story
-- ARGV: connection, whether there is one, only if free, now, new log epoch, window (3), why the
-- position is none, its epoch, its number; of the entry of its story, the time and the text
--
-- As core/attachment.py: the newest attachment is the only one (RES3, TKO1).
local fields = redis.call('HMGET', base, 'ends', 'conn', 'fence', 'maker', 'waits')
local now = tonumber(ARGV[4])
if not fields[1] or has_come(fields[1], now) or (ARGV[3] == '1' and fields[2]) then
    return false
end
local ends = seconds(fields[1])
local log = open_or_make_log('events', ARGV[5], ends)
local window = window_of(log, ends, ARGV[6], ARGV[7], ARGV[8])
local fence = tonumber(fields[3]) + 1
if redis.call('HDEL', base, 'lost') == 1 then
    -- Whoever has an epoch that the data set knows nothing of must not find it valid again.
    fence = fence + 1000
end
local entries, reason = since(log, now, window, ARGV[9], ARGV[10], ARGV[11], '')
redis.call('HSET', base, 'fence', whole(fence))
if ARGV[2] == '1' then
    redis.call('HSET', base, 'conn', ARGV[1])
    redis.call('HDEL', base, 'waits')
else
    fields[5] = false
    redis.call('HDEL', base, 'conn')
end
if ARGV[12] then
    local taken = fields[2] and fields[2] ~= ARGV[1] and 'over' or 'free'
    tell(ARGV[12], table.concat({
        ARGV[13], taken, ARGV[9] == '' and ARGV[11] or '-', whole(log.head), #(entries or {}),
        whole(log.evicted), reason or '-',
    }, ' '))
end
return {
    whole(fence), log.epoch, whole(log.head), fields[2], fields[3], reason or false,
    entries or {}, fields[4], fields[5],
}
