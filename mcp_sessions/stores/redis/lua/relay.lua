-- needs: session log
-- ARGV: origin, fencing epoch, log epoch and number of the event, skips, now, new log epoch,
-- window (3), payload, key, whether it has one
-- As core/attachment.py: once, and in the order of the session's own log (ATT6).
local ends, now = redis.call('HGET', base, 'ends'), tonumber(ARGV[6])
if not ends or has_come(ends, now) then
    return false
end
ends = seconds(ends)
local origin, epoch, number = ARGV[1], ARGV[3], tonumber(ARGV[4])
local carried = redis.call('HGET', base .. ':c', origin)
if not carried then
    return false
end
local fence, last_epoch, last = string.match(carried, '^(%d+) (%d+) (%d+)$')
last = tonumber(last)
if fence ~= ARGV[2] or epoch < last_epoch then
    return false
end
if epoch > last_epoch then
    -- Its log was made anew: none of the new one's events is here.
    last_epoch, last = epoch, 0
end
if number <= last then
    return false
end
if number > last + 1 and ARGV[5] ~= '1' then
    return { 'missing', last_epoch, whole(last) }
end
redis.call('HSET', base .. ':c', origin, table.concat({ fence, epoch, whole(number) }, ' '))
local log = open_or_make_log('get', ARGV[7], ends)
local window = window_of(log, ends, ARGV[8], ARGV[9], ARGV[10])
local payload = append(
    log, now, window, ARGV[11], nil, ARGV[13] == '1' and ARGV[12] or nil, origin)
if not payload then
    return redis.error_reply('EVENTIDS this event log has issued its last id')
end
return { 'relayed', log.epoch, whole(log.head) }
